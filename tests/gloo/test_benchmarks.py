"""The benchmarks compare like with like: both sides of every pair do the same work."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import buckets, pipeline, sides
from benchmarks.memory import tensor_peak
from benchmarks.sides import Shape
from benchmarks.spans import Span, makespan, overheads
from benchmarks.step import CELLS, Cell, chosen_shape, lines, measure
from benchmarks.timing import Spread, interleave
from rankmesh.schedule import Action, Costs, Kind, build_schedule, simulate
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


def _work(cell: pipeline.Cell) -> pipeline.Work:
    return pipeline.Work(cell, replace(TINY, layers=4), microbatches=4)


@pytest.mark.parametrize("cell", pipeline.CELLS, ids=lambda cell: cell.name)
def test_both_pipelines_have_the_same_losses(pool: Pool, cell: pipeline.Cell) -> None:
    """Under every schedule, to five digits at least; each action of each step has been timed."""
    figures = pipeline.measure_time(pool, _work(cell), pairs=2)
    losses = figures["losses"]
    assert losses["ours"] == pytest.approx(losses["peer"], rel=1e-5)
    assert len(set(losses["ours"])) == len(losses["ours"]) == 4
    assert figures["loss_difference"] < 1e-5
    # No rank is faster than the schedule allows with the very times that its actions took.
    assert figures["simulated_own"]["low"] > 0.99


def peer_order(worker: Worker, *, work: dict[str, Any]) -> list[str]:
    """What torch's schedule computes on this rank, in our letters; idle slots left out."""
    worker.start()
    order = pipeline.read_work(work).peer().schedule.pipeline_order[worker.rank]
    letters = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    return [
        f"{letters[a.computation_type.name]}{a.stage_index}.{a.microbatch_index}"
        for a in order
        if a is not None
    ]


@pytest.mark.parametrize("cell", pipeline.CELLS[1:], ids=lambda cell: cell.name)
def test_both_pipelines_run_the_same_schedule(pool: Pool, cell: pipeline.Cell) -> None:
    """Action for action, on every rank. (torch's 1F1B is a loop and has no list.)"""
    work = _work(cell)
    peer = pool.run("tests.gloo.test_benchmarks:peer_order", 2, work=work.to_dict())
    ours = build_schedule(cell.name, 2, cell.chunks, work.microbatches)
    assert peer == [[str(action) for action in rank] for rank in ours]


def test_memory_of_pipelines(pool: Pool) -> None:
    """Each side of a cell alone, by each measure; and the table can be printed."""
    work = _work(pipeline.CELLS[2])
    figures = pipeline.measure(pool, work, pairs=1)
    memory = figures["memory"]
    assert set(memory) == {"tensors", "resident"}
    for side in ("ours", "peer"):
        assert [rank["peak"] > rank["before"] for rank in memory["tensors"][side]] == [True] * 2
    assert sum("peak" in line for line in pipeline.lines(figures)) == 2


def test_peak_of_tensors() -> None:
    """What lives before the measured step, and at most within it; what is freed does not count."""
    kept: list[torch.Tensor] = []
    # What an earlier test left in cycles would be freed within the measurement.
    gc.collect()

    def build() -> Any:
        kept.append(torch.zeros(1000))

        def step() -> None:
            first = torch.zeros(500)
            del first
            kept.append(torch.zeros(100))

        return step

    assert tensor_peak(build, 1) == {"before": 4400, "peak": 6400}


@pytest.mark.parametrize("cell", pipeline.CELLS, ids=lambda cell: cell.name)
def test_schedules_play_with_costs_of_each_stage(cell: pipeline.Cell) -> None:
    """With the same costs everywhere it is the simulation; a dear stage makes it longer by more
    than its own work where others wait for it.
    """
    schedule = build_schedule(cell.name, 2, cell.chunks, 4)
    costs = Costs(1.0, 1.5, 0.5)
    assert makespan(schedule, lambda action: costs.of(action.kind)) == pytest.approx(
        simulate(schedule, costs).makespan
    )
    dear = makespan(schedule, lambda action: costs.of(action.kind) * (1 + (action.stage == 0)))
    assert dear >= 4 * 6.0


def test_overheads_compare_with_earlier_steps_and_with_the_step_itself() -> None:
    """Two microbatches on one rank: time between actions is overhead, time spent waiting is not."""

    def step(cost: float, gap: float) -> list[Span]:
        spans, now = [], 0.0
        for microbatch in range(2):
            for kind in ("F", "B"):
                spans.append((kind, 0, microbatch, now, now + cost + 1.0, 1.0))
                now += cost + 1.0 + gap
        return spans

    schedule = (tuple(Action(Kind(k), 0, m) for m in range(2) for k in "FB"),)
    early, own = overheads(schedule, [step(9.0, 9.0), step(2.0, 0.0), step(4.0, 1.0)], 2)
    measured = 4 * 5.0 + 3 * 1.0
    assert (early, own) == ([measured / 8.0], [measured / 16.0])


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
