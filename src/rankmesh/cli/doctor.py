"""The options of `rankmesh doctor`. Its body, which needs torch, is in doctor_run.py."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "check machines, links and versions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.epilog = (
        "Alone it starts N local processes; under torchrun, srun or mpirun it joins those that are "
        "there. Ends with 1 where a process, a device or a link does not work; a slow link or a "
        "tight limit is a warning."
    )
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="local processes to start (default: the visible GPUs, or 2 to 4 on a CPU)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=20.0,
        metavar="S",
        help="seconds that a link may take to answer (default: 20)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    # Where rank 0 of a doctor's own processes leaves its report for the one who started them.
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
