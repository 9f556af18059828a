"""The options of `rankmesh map`. Its body, which needs numpy and rich, is in map_run.py."""

from __future__ import annotations

import argparse

HELP = "rank map and groups of any world, without processes"

# Nobody reads a table of more rows: the first few are shown unless --all asks for the rest.
FULL_TABLE = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add = parser.add_argument
    add("--world-size", type=int, required=True, metavar="N", help="number of ranks")
    for axis, meaning in (
        ("tp", "tensor parallel size"),
        ("cp", "context parallel size"),
        ("pp", "pipeline parallel size"),
        ("ep", "expert parallel size, folded over tp * cp * dp"),
        ("etp", "tensor parallel size inside an expert"),
    ):
        add(f"--{axis}", type=int, default=1, metavar="SIZE", help=f"{meaning} (default 1)")
    add("--dp", type=int, metavar="SIZE", help="data parallel size (default: what remains)")
    add("--cp-ulysses", type=int, default=1, metavar="U", help="cp ranks that exchange heads")
    add("--zero-group", type=int, metavar="Z", help="ranks that share one set of ZeRO shards")
    add("--kv-heads", type=int, metavar="K", help="the model's KV heads, for the tp_rep groups")
    add("--order", metavar="A,B,C,D",
        help="axes, fastest-varying first (default tp,cp,dp,pp)")  # fmt: skip
    add("--ranks-per-host", metavar="N[,N...]",
        help="one number for all hosts, or one for each host")  # fmt: skip
    add("--placement", choices=("block", "cyclic"), default="block",
        help="how ranks are laid on the hosts (default block)")  # fmt: skip
    add("--rank", type=int, metavar="R", help="answer for one rank, in five lines")
    add("--all", action="store_true", help=f"show every rank, also beyond {FULL_TABLE}")
    add("--json", action="store_true", help="for machines: the whole map as one JSON object")
