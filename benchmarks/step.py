"""Benchmark of a whole optimizer step against what a PyTorch user would run otherwise.

Owns the three comparisons, the command line and the table. Both sides of a comparison live in the
same processes, start from the same weights, see the same batches, and take turns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import sides
from benchmarks.sides import Shape
from benchmarks.timing import Spread, calibration, compared
from rankmesh.testing.spawn import Pool
from rankmesh.testing.worker import Worker

ROOT = Path(__file__).resolve().parents[1]
_WARM_UP = 2
_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Cell:
    """One comparison: a mesh, the peer's name, and the ratio of peer time to our time wanted."""

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
    ours = sides.our_steps(sides.our_run(worker, sized, tp, dp), batches)
    return compared(ours, sides.peer_steps(peer, batches), pairs, _WARM_UP, dist.barrier)


def measure(pool: Pool, cell: Cell, shape: Shape, pairs: int) -> dict[str, Any]:
    """The figures of one comparison.

    A step takes as long as its slowest rank, and as much CPU time as all ranks together. A loss of
    a peer with several replicas is the mean of the ranks' own.
    """
    ranks = pool.run(
        "benchmarks.step:job",
        cell.tp * cell.dp,
        timeout=_TIMEOUT_S,
        tp=cell.tp,
        dp=cell.dp,
        shape=shape.to_dict(),
        pairs=pairs,
    )

    def joined(key: str, side: int) -> list[tuple[float, ...]]:
        return list(zip(*(rank[key][side] for rank in ranks), strict=True))

    wall = [[max(each) for each in joined("wall", side)] for side in (0, 1)]
    cpu = [[sum(each) for each in joined("cpu", side)] for side in (0, 1)]
    losses = [[sum(each) / len(ranks) for each in joined("losses", side)] for side in (0, 1)]
    ratios = [theirs / ours for ours, theirs in zip(*wall, strict=True)]
    cpu_ratios = [theirs / ours for ours, theirs in zip(*cpu, strict=True)]
    return {
        **asdict(cell),
        "seconds": {"ours": wall[0], "peer": wall[1]},
        "cpu_seconds": {"ours": cpu[0], "peer": cpu[1]},
        "ratios": ratios,
        "ratio": asdict(Spread.of(ratios)),
        "cpu_ratio": asdict(Spread.of(cpu_ratios)),
        "met": Spread.of(ratios).median >= cell.goal,
        "losses": {"ours": losses[0], "peer": losses[1]},
        "gflops": [rank["gflops"] for rank in ranks],
    }


def lines(figures: dict[str, Any]) -> list[str]:
    """What a person reads of one comparison."""
    ours, peer = (Spread.of(figures["seconds"][side]).median for side in ("ours", "peer"))
    verdict = "met" if figures["met"] else "NOT MET"
    losses = [f"{each[0]:.6f} .. {each[-1]:.6f}" for each in figures["losses"].values()]
    return [
        f"{figures['name']}: rankmesh against {figures['peer']}",
        f"  median step   {ours:.3f} s against {peer:.3f} s",
        f"  peer / ours   {told(figures['ratio'])}; goal {figures['goal']}: {verdict}",
        f"  in CPU time   {told(figures['cpu_ratio'])}",
        f"  each pair     {' '.join(f'{each:.3f}' for each in figures['ratios'])}",
        f"  matmul        {calibration(figures['gflops'])}",
        f"  losses        {losses[0]} against {losses[1]}",
    ]


def told(ratio: dict[str, float]) -> str:
    """Median, quartiles and range of a ratio, as a person reads them."""
    return (
        f"{ratio['median']:.3f} (quartiles {ratio['quarter']:.3f} to {ratio['three_quarters']:.3f},"
        f" range {ratio['low']:.3f} to {ratio['high']:.3f})"
    )


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Options for every size, and --quick."""
    parser.add_argument(
        "--quick", action="store_true", help="a small shape and 3 rounds: does it run at all?"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    for option in fields(Shape):
        name = f"--{option.name.replace('_', '-')}"
        parser.add_argument(name, type=int, help=f"default {option.default}")


def chosen_shape(args: argparse.Namespace) -> Shape:
    """The sizes given, over the quick or the full shape."""
    base = (QUICK if args.quick else Shape()).to_dict()
    given = {name: value for name in base if (value := getattr(args, name)) is not None}
    if "heads" in given:
        given.setdefault("kv_heads", given["heads"])
    return Shape(**base | given)


def facts(shape: Shape) -> dict[str, Any]:
    """What the figures depend on."""
    sizes = ", ".join(f"{name} {size}" for name, size in shape.to_dict().items())
    print(f"torch {torch.__version__}, fp32, eager, 1 thread a process; {sizes}", flush=True)
    return {"torch": torch.__version__, "threads": 1, "dtype": "fp32", "shape": shape.to_dict()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the chosen cells. A missed goal is no failure: machines differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    names = [cell.name for cell in CELLS]
    parser.add_argument("--cells", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--pairs", type=int, default=7, help="interleaved pairs (default 7)")
    add_shape(parser)
    args = parser.parse_args(argv)
    shape = chosen_shape(args)
    report = facts(shape) | {"cells": []}
    with Pool(cwd=ROOT) as pool:
        for cell in CELLS:
            if cell.name in args.cells:
                figures = measure(pool, cell, shape, 3 if args.quick else args.pairs)
                report["cells"].append(figures)
                print("\n".join(lines(figures)), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
