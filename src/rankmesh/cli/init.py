"""The options of `rankmesh init`. Its body is in init_run.py."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.epilog = (
        "The file holds the keys that everyone meets, each with its meaning, what it takes and its "
        "default; lines that start with # are defaults. An existing file is never overwritten."
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a preset (llama-mini), a family (llama, with --size), or a folder with weights",
    )
    parser.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        help="values to write into the file, as `rankmesh train` takes them",
    )
    parser.add_argument(
        "--size",
        metavar="N",
        help="parameters of a family's model, such as 10m, 350m or 1.5b (default: 10m)",
    )
    parser.add_argument(
        "--out", metavar="FILE", default="run.toml", help="(default: run.toml; - prints it)"
    )
    parser.add_argument("--all", action="store_true", help="every key, not only the common ones")


def default_run_dir(out: str) -> str:
    """The run folder that a config of that name gets: `runs/notes` for `notes.toml`."""
    return f"runs/{'run' if out == '-' else Path(out).stem}"
