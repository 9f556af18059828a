"""The benchmarks compare like with like: both sides of every pair do the same work."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import buckets, sides
from benchmarks.sides import Shape
from benchmarks.step import CELLS, Cell, chosen_shape, lines, measure
from benchmarks.timing import Spread, interleave
from rankmesh.testing.spawn import Pool
from rankmesh.testing.worker import Worker

TINY = Shape(hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, seq=16, vocab=64)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_both_sides_have_the_same_losses(pool: Pool, cell: Cell) -> None:
    """From the same weights, over the steps of a measurement; and the table can be printed."""
    figures = measure(pool, cell, TINY, pairs=2)
    losses = figures["losses"]
    assert losses["ours"] == pytest.approx(losses["peer"], rel=1e-5)
    assert len(set(losses["ours"])) == len(losses["ours"]) == 4
    assert len(figures["ratios"]) == 2 and all(ratio > 0 for ratio in figures["ratios"])
    assert {len(speeds) for speeds in figures["gflops"]} == {3}
    assert any("losses" in line for line in lines(figures))


def cuts(worker: Worker) -> list[Any]:
    """(start, stop) of the buckets of one size: made so, and cut from another size."""
    small, large = 0.004, 1.0
    made = sides.our_run(worker, TINY, 1, worker.world_size, small)
    recut = sides.our_run(worker, TINY, 1, worker.world_size, large)
    before = len(recut.buffers.buckets)
    buckets.cut(recut, small)
    pairs = [[(b.start, b.stop) for b in r.buffers.buckets] for r in (made, recut)]
    places = [[s.bucket.start for s in r.buffers.slots] for r in (made, recut)]
    return [before, pairs, places]


def test_the_sweep_cuts_buckets_as_a_run_would(pool: Pool) -> None:
    """One model serves all sizes of the sweep."""
    for before, (made, recut), places in pool.run("tests.gloo.test_benchmarks:cuts", 2):
        assert before == 1 < len(made) and made == recut
        assert places[0] == places[1]


def test_sides_take_turns() -> None:
    """A B, B A, A B; the speed of the machine is taken before, between and after."""
    calls: list[str] = []
    work = (lambda: calls.append("A"), lambda: calls.append("B"))
    taken, speeds = interleave(work, 3, lambda: None)
    assert "".join(calls) == "ABBAAB"
    assert [len(side) for side in taken] == [3, 3] and len(speeds) == 4


def test_spread() -> None:
    """Median, quartiles and range; one figure alone is all of them."""
    assert Spread.of([3.0, 1.0, 2.0, 5.0, 4.0]) == Spread(3.0, 1.0, 2.0, 4.0, 5.0)
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0, 2.0, 2.0)


def test_sizes_from_the_command_line() -> None:
    """Heads alone set the KV heads too."""
    names = [*Shape().to_dict(), "quick", "json"]
    args = type("Args", (), dict.fromkeys(names) | {"heads": 8, "layers": 3})
    assert chosen_shape(args) == Shape(heads=8, kv_heads=8, layers=3)
