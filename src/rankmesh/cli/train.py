"""The options of `rankmesh train`. Its body, which needs torch, is in train_run.py."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "train a model from a config file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.epilog = (
        "Alone it starts N local processes and prints the torchrun line that it stands for; under "
        "torchrun, srun or mpirun it joins those that are there. The keys of a config are in "
        "docs/config.md."
    )
    parser.add_argument("config", metavar="CONFIG.toml", type=Path, help="the run's config")
    parser.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=[],
        help="changes to the config; the last of several for one key wins",
    )
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="local processes to start (default: the plan's ranks on CPUs, else the visible GPUs)",
    )
