"""The options of `rankmesh verify`. Its body, which needs torch, is in verify_run.py."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "compare a config's mesh with a single process"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.epilog = (
        "Trains a few steps on the config's mesh and, beside it, with a plain loop in one process, "
        "and prints the largest differences. Computes in fp64, where rounding hides nothing. Each "
        "rank also holds the whole model: meant for small models, or small versions of large ones "
        "(model.num_layers=2). Nothing is written. Ends with 1 where a difference exceeds its "
        "limit."
    )
    parser.add_argument("config", metavar="CONFIG.toml", type=Path, help="the run's config")
    parser.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=[],
        help="changes to the config",
    )
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="local processes (default: as `rankmesh train`)"
    )
    parser.add_argument(
        "--steps", type=int, default=3, metavar="K", help="steps to compare (default: 3)"
    )
    parser.add_argument(
        "--own-dtype",
        action="store_true",
        help="compare in the config's dtype, with eps at least 1e-4, instead of in fp64",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
