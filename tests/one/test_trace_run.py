"""Traces of real runs in one process: what is in the files, when they are written, and when not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rankmesh.cli.main import main
from rankmesh.comm.mesh import fake_mesh
from rankmesh.obs.trace import COMMUNICATION, COMPUTE, OPTIMIZER, Tracer, TraceSpan
from rankmesh.topology.plan import ParallelPlan
from rankmesh.train.run import assemble, fresh_values
from rankmesh.train.step import train_step
from tests import runs, tiny

TRACE = ["log.trace=true", "data.valid=[]"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return runs.write_config(tmp_path)


def events(run_dir: Path, name: str = "rank-0000.json") -> list[dict[str, Any]]:
    """The complete events of a file."""
    found = json.loads((run_dir / "trace" / name).read_text())["traceEvents"]
    for event in found:
        assert {"name", "ph", "pid", "tid", "args"} <= set(event)
    return [event for event in found if event["ph"] == "X"]


def test_a_run_leaves_what_it_did(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three microbatches a step, the parts of the optimizer, nothing that moves; and the command
    reads it.
    """
    folder = runs.go(config, "run", 4, TRACE)
    found = events(folder)
    assert all(event["dur"] >= 0 and event["pid"] == 0 for event in found)
    for step in range(1, 5):
        mine = [event for event in found if event["args"]["step"] == step]
        names = [event["name"] for event in mine if event["cat"] == COMPUTE]
        assert names == ["F0.0", "B0.0", "F0.1", "B0.1", "F0.2", "B0.2"]
        parts = [event["name"] for event in mine if event["cat"] == OPTIMIZER]
        assert parts == ["step", "count", "buckets", "norm", "clip", "update"]
    assert {event["cat"] for event in found} == {COMPUTE, OPTIMIZER}
    capsys.readouterr()
    assert main(["trace", str(folder), "--json"]) == 0
    bubble = json.loads(capsys.readouterr().out)["bubble"]
    assert bubble["textbook"] == bubble["simulated"]["median"] == 0
    assert 0 <= bubble["measured"]["median"] < 0.5


@pytest.mark.parametrize(
    ("window", "steps"), [("[2,3]", {2, 3}), ("[5,9]", {5, 6}), ("none", set(range(1, 7)))]
)
def test_the_window_bounds_what_is_kept(config: Path, window: str, steps: set[int]) -> None:
    """A run that ends inside it writes what it has."""
    folder = runs.go(config, "run", 6, [*TRACE, f"log.trace_steps={window}"])
    assert {event["args"]["step"] for event in events(folder)} == steps


def test_without_trace_there_is_no_file(config: Path) -> None:
    """Nor for a window that the run does not reach."""
    folder = runs.go(config, "run", 2, ["data.valid=[]"])
    assert not (folder / "trace").exists()
    folder = runs.go(config, "late", 2, [*TRACE, "log.trace_steps=[3,4]"])
    assert not (folder / "trace").exists()


def test_a_resume_adds_a_file(config: Path) -> None:
    """The first attempt's stays as it was; the window starts anew."""
    folder = runs.go(config, "run", 3, TRACE)
    first = folder / "trace" / "rank-0000.json"
    before = first.read_bytes()
    runs.go(config, "run", 5, TRACE)
    assert first.read_bytes() == before
    assert {event["args"]["step"] for event in events(folder, "rank-0000-2.json")} == {4, 5}


def test_a_trace_that_cannot_be_written_ends_no_run(config: Path) -> None:
    """It is a warning; the losses are those of a run without."""
    plain = runs.go(config, "plain", 2, ["data.valid=[]"])
    folder = config.parent / "run"
    folder.mkdir()
    (folder / "trace").write_text("in the way")
    runs.go(config, "run", 2, TRACE)
    assert "trace: cannot be written" in runs.said(folder)
    assert runs.figures(folder, "loss") == runs.figures(plain, "loss")


@pytest.mark.parametrize("pp", [1, 2])
def test_every_collective_of_a_step_is_a_span(pp: int) -> None:
    """Op, axis, phase and bytes are those of the ledger, in its order; one rank is played alone."""
    spans: list[TraceSpan] = []
    mesh = fake_mesh(ParallelPlan(tp=2, dp=2, pp=pp), 0)
    config = tiny.config(tp=2, dp=2, pp=pp)
    source = fresh_values(config.train.seed)
    tracer = Tracer(range(1, 2), write=spans.extend)
    run = assemble(config, tiny.llama(), mesh, source, tracer)
    run.hops.checked = False
    batch = tiny.batches(steps=1, global_batch=7, seq_len=11, vocab=61)[0]
    train_step(run, 1, tiny.microbatches(batch, run.batch, 0))
    passed = [
        (event.op, event.axis, event.phase, event.payload_bytes)
        for event in mesh.seam.ledger.take().events
    ]
    traced = [
        (span.name, *(span.args[key] for key in ("axis", "phase", "bytes")))
        for span in spans
        if span.track == COMMUNICATION
    ]
    assert traced == passed
    assert Counter(span.name for span in spans if span.track == OPTIMIZER)["norm"] == 1
    train_step(run, 2, tiny.microbatches(batch, run.batch, 0))
    assert len([span for span in spans if span.track == COMMUNICATION]) == len(passed)
