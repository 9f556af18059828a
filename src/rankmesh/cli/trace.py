"""The options of `rankmesh trace`. Its body, which needs numpy and rich, is in trace_run.py."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "the measured timeline of a traced run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.epilog = (
        "Needs a run with log.trace=true. Writes RUN_DIR/trace/merged.json, every traced step of "
        "all ranks on one clock, for ui.perfetto.dev. The bubble is the share of the time from the "
        "first start to the last end of F, B, I or W on the pipeline ranks of one replica in which "
        "a rank runs none of them. Simulated: the same order of actions, each as long as the "
        "median of its kind and stage in the steps before those compared. docs/trace.md says more."
    )
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", type=Path, help="a run directory")
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--step", type=int, metavar="N", help="compare this step alone")
    steps.add_argument("--steps", metavar="A:B",
        help="compare steps A to B, and draw the one whose bubble is the median "
        "(default: the later half of the traced steps)")  # fmt: skip
    add("--attempt", type=int, metavar="N", help="launch of the run (default: the newest traced)")
    for axis in ("dp", "tp", "cp"):
        add(f"--{axis}", type=int, default=0, metavar="N",
            help=f"{axis} rank of the pipeline ranks that are shown (default 0)")  # fmt: skip
    add("--svg", metavar="OUT", help="write the timeline as an SVG picture")
    add("--json", action="store_true", help="for machines: figures and times as one JSON object")
