"""The options of `rankmesh schedule`. Its body, which needs rich, is in schedule_run.py."""

from __future__ import annotations

import argparse

HELP = "a pipeline schedule drawn, with bubble and live activations"
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add = parser.add_argument
    add("--pp", type=int, metavar="P", help="pipeline ranks")
    add("--microbatches", type=int, metavar="M", help="microbatches of a step")
    add("--chunks", type=int, metavar="V",
        help="stages of a rank (default: what the schedule runs; 2 for interleaved)")  # fmt: skip
    add("--schedule", choices=NAMES, metavar="S",
        help=f"{', '.join(NAMES)} (default 1f1b)")  # fmt: skip
    add("--costs", default="1,1,1,0", metavar="F,I,W,SEND",
        help="time of F, I and W of one stage (B is I + W) and of a transfer, in any unit "
        "(default 1,1,1,0)")  # fmt: skip
    add("--memory", type=float, metavar="N",
        help="most activations of one chunk that a rank may hold, each from F to B or W; zb-h1, "
        "zb-h2 and zb-v are then arranged for the costs")  # fmt: skip
    add("--file", metavar="FILE", help="check and draw the schedule in this text file instead")
    add("--svg", metavar="OUT", help="write the timeline as an SVG picture")
    add("--json", action="store_true", help="for machines: figures and times as one JSON object")
