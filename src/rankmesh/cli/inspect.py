"""The options of `rankmesh inspect`. Its body is in inspect_run.py."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.epilog = "Exit code 2 where --verify finds damage; docs/checkpoints.md has the format."
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        type=Path,
        help="checkpoint, or run directory (its newest complete one)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read every byte and compare the checksums"
    )
    parser.add_argument(
        "--json", action="store_true", help="for machines: one JSON object, with every tensor"
    )
