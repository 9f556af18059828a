"""Benchmark of a whole optimizer step against what a PyTorch user would run otherwise, side by side.

Owns the three comparisons, the command line and the table. Both sides of a comparison live in the same
processes, start from the same weights, see the same batches, and take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import sides
from benchmarks.sides import Shape
from benchmarks.timing import Spread, interleave, slowest
from rankmesh.testing.spawn import Pool
from rankmesh.testing.worker import Worker

_WARM_UP = 2
_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Cell:
    """One comparison: a mesh, the peer's name, and the least ratio of peer time to our time that is wanted."""

    name: str
    peer: str
    tp: int
    dp: int
    goal: float


CELLS = (
    Cell("one", "plain PyTorch, one file", 1, 1, 0.97),
    Cell("tp2", "DTensor tensor parallelism", 2, 1, 1.0),
    Cell("dp2", "DistributedDataParallel", 1, 2, 1.0),
)
QUICK = Shape(hidden=128, layers=2, heads=4, kv_heads=4, ffn=352, seq=64, vocab=512)


def job(worker: Worker, *, tp: int, dp: int, shape: dict[str, int], pairs: int) -> dict[str, Any]:
    """Runs on every rank: times both sides in turn; returns seconds, losses and GFLOP/s."""
    worker.start()
    sized = Shape(**shape)
    batches = sized.batches(_WARM_UP + pairs, worker.rank if dp > 1 else 0)
    if tp > 1:
        peer = sides.dtensor_trainer(sized, tp)
    else:
        peer = sides.ddp_trainer(sized) if dp > 1 else sides.plain_trainer(sized)
    steps = (
        sides.our_steps(sides.our_run(worker, sized, tp, dp), batches),
        sides.peer_steps(peer, batches),
    )
    losses: list[list[float]] = [[], []]
    runs = [lambda i=i: losses[i].append(steps[i]()) for i in range(2)]
    for run in runs * _WARM_UP:
        run()
    taken, speeds = interleave(runs, pairs, dist.barrier)
    return {"seconds": taken, "losses": losses, "gflops": speeds}


def measure(pool: Pool, cell: Cell, shape: Shape, pairs: int) -> dict[str, Any]:
    """The figures of one comparison. A loss of a peer over several replicas is the mean of the ranks' own."""
    ranks = pool.run(
        "benchmarks.step:job",
        cell.tp * cell.dp,
        timeout=_TIMEOUT_S,
        tp=cell.tp,
        dp=cell.dp,
        shape=shape.to_dict(),
        pairs=pairs,
    )
    ours, peer = (slowest([rank["seconds"][side] for rank in ranks]) for side in (0, 1))
    ratios = [b / a for a, b in zip(ours, peer, strict=True)]
    losses = [[sum(each) / len(ranks) for each in zip(*(rank["losses"][i] for rank in ranks), strict=True)]
              for i in (0, 1)]  # fmt: skip
    return {
        **asdict(cell),
        "our_seconds": ours,
        "peer_seconds": peer,
        "ratios": ratios,
        "ratio": asdict(Spread.of(ratios)),
        "met": Spread.of(ratios).median >= cell.goal,
        "our_losses": losses[0],
        "peer_losses": losses[1],
        "gflops": [rank["gflops"] for rank in ranks],
    }


def lines(figures: dict[str, Any]) -> list[str]:
    """What a person reads of one comparison."""
    ratio, ours, peer = figures["ratio"], figures["our_seconds"], figures["peer_seconds"]
    speeds = [speed for rank in figures["gflops"] for speed in rank]
    verdict = "met" if figures["met"] else "NOT MET"
    return [
        f"{figures['name']}: rankmesh against {figures['peer']}",
        f"  median step   {Spread.of(ours).median:.3f} s against {Spread.of(peer).median:.3f} s",
        f"  peer / ours   {ratio['median']:.3f}  (quartiles {ratio['quarter']:.3f} {ratio['three_quarters']:.3f}, "
        f"range {ratio['low']:.3f} {ratio['high']:.3f}); goal {figures['goal']}: {verdict}",
        f"  each pair     {' '.join(f'{each:.3f}' for each in figures['ratios'])}",
        f"  matmul        {Spread.of(speeds).median:.0f} GFLOP/s a thread "
        f"(range {min(speeds):.0f} {max(speeds):.0f}) before, between and after",
        f"  losses        {figures['our_losses'][0]:.6f} .. {figures['our_losses'][-1]:.6f} against "
        f"{figures['peer_losses'][0]:.6f} .. {figures['peer_losses'][-1]:.6f}",
    ]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument(
        "--cells", nargs="+", choices=[cell.name for cell in CELLS], help="default: all"
    )
    parser.add_argument("--pairs", type=int, default=7, help="interleaved pairs (default 7)")
    parser.add_argument(
        "--quick", action="store_true", help="a small shape and 3 pairs: does it run at all?"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    for option in fields(Shape):
        parser.add_argument(
            f"--{option.name.replace('_', '-')}", type=int, help=f"default {option.default}"
        )
    return parser.parse_args(argv)


def chosen_shape(args: argparse.Namespace) -> Shape:
    """The shape of the options, over the quick or the full one."""
    base = (QUICK if args.quick else Shape()).to_dict()
    given = {name: value for name in base if (value := getattr(args, name)) is not None}
    if "heads" in given:
        given.setdefault("kv_heads", given["heads"])
    return Shape(**base | given)


def main() -> None:
    """Measure the chosen cells; exit 0 also where a goal is missed, since machines differ."""
    args = arguments()
    shape, pairs = chosen_shape(args), 3 if args.quick else args.pairs
    facts = {"torch": torch.__version__, "threads": 1, "pairs": pairs, "shape": shape.to_dict()}
    print(
        "step:",
        ", ".join(f"{name} {value}" for name, value in shape.to_dict().items()),
        "| fp32, eager, 1 thread",
    )
    cells = []
    with Pool() as pool:
        for cell in CELLS:
            if args.cells is None or cell.name in args.cells:
                cells.append(measure(pool, cell, shape, pairs))
                print("\n".join(lines(cells[-1])), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(facts | {"cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
