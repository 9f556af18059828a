"""The options of `rankmesh demo`. Its body, which needs torch, is in demo_run.py."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "train a small model on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.epilog = (
        "Text: the sources of this Python's standard library. Mesh: 4 local processes, dp 2 x "
        "tp 2; at the end 8, dp 2 x pp 2 x tp 2. The config is written into the folder: train from "
        "it again, change it, verify it."
    )
    parser.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=[],
        help="changes to the demo's config",
    )
    parser.add_argument(
        "--dir", type=Path, default=Path("runs/demo"), metavar="DIR", help="(default: runs/demo)"
    )
