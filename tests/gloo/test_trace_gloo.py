"""Measured against simulated: pipelines of real processes whose actions are fixed waits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankmesh.cli.main import main
from rankmesh.obs.trace import COMMUNICATION, COMPUTE
from rankmesh.obs.tracefile import read_trace
from rankmesh.testing.spawn import Pool
from tests import runs
from tests.gloo.trace_jobs import WAITS

STEPS = 8
INTERLEAVED = {"schedule": "interleaved", "num_chunks": 2}


def _traced(
    pool: Pool, folder: Path, pp: int, parallel: dict[str, Any], batches: int, steps: int = STEPS
) -> Path:
    pool.run(
        "tests.gloo.trace_jobs:fixed_waits", pp,
        run_dir=str(folder), pp=pp, parallel=parallel, steps=steps, batches=batches,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize(
    ("pp", "parallel", "batches"),
    [(2, {"schedule": "1f1b"}, 6), (4, {"schedule": "1f1b"}, 8), (4, {"schedule": "zb-h1"}, 8)],
    ids=["1f1b pp2", "1f1b pp4", "zb-h1 pp4"],
)
def test_the_measured_bubble_is_the_simulated_one(
    pool: Pool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    pp: int,
    parallel: dict[str, Any],
    batches: int,
) -> None:
    """Within 3 percentage points, the median of four steps from the times of the four before them.

    Three tries, for the machine may be busy.
    """
    seen = []
    for attempt in range(3):
        folder = _traced(pool, tmp_path / str(attempt), pp, parallel, batches)
        assert main(["trace", str(folder), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["costs_from"] == [1, 2, 3, 4] and found["steps"] == [5, 6, 7, 8]
        bubble = found["bubble"]
        seen.append((bubble["measured"]["median"], bubble["simulated"]["median"]))
        if abs(seen[-1][0] - seen[-1][1]) <= 0.03:
            break
    else:
        pytest.fail(f"measured and simulated: {seen}")
    # Messages cost something, never less than nothing.
    assert bubble["textbook"] - 0.01 <= bubble["measured"]["median"] < bubble["textbook"] + 0.25


def test_what_each_rank_of_a_pipeline_records(pool: Pool, tmp_path: Path) -> None:
    """Every action of its stages, as long as it waits; a hop for every message, to its end."""
    folder = _traced(pool, tmp_path / "run", 2, INTERLEAVED, batches=4, steps=2)
    for rank in range(2):
        trace = read_trace(folder / "trace" / f"rank-{rank:04}.json")
        spans = [span for span in trace.spans if span.step == 2]
        actions = [span for span in spans if span.track == COMPUTE]
        assert {(s.args["kind"], s.args["stage"], s.args["microbatch"]) for s in actions} == {
            (kind, stage, batch)
            for kind in "FB"
            for stage in (rank, rank + 2)
            for batch in range(4)
        }
        for span in actions:
            assert (span.end - span.start) / 1e9 >= WAITS[str(span.args["kind"])]  # type: ignore[index]
        hops = [span for span in spans if span.args.get("axis") == "pp"]
        # Three of the four stages send forward, three send back; each goes to the other rank.
        sends = {"forward": (8, 4), "backward": (4, 8)}
        for phase, counts in sends.items():
            mine = [span.name for span in hops if span.args["phase"] == phase]
            assert mine.count("send") == 4 * (counts[rank] // 4)
            assert mine.count("receive") == 4 * (counts[1 - rank] // 4)
        assert all("microbatch" in str(span.args["what"]) for span in hops)
        (norm,) = [s for s in spans if s.track == COMMUNICATION and s.args["phase"] == "norm"]
        assert norm.start > max(span.end for span in actions)


def test_ranks_that_the_command_starts_are_traced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of two stages writes its file, and both are merged."""
    changes = ["parallel.pp=2", "train.steps=2", "data.valid=[]", "log.trace=true"]
    words = ["-m", "rankmesh", "train", str(runs.write_config(tmp_path)), *changes]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert main(["trace", str(tmp_path / "run"), "--step", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["costs_from"], found["missing_ranks"]) == ([1], [])
    actions = [[span[0] for span in spans] for spans in found["timeline_ms"]["actions"]]
    assert ["".join(kinds) for kinds in actions] == ["FFBFBB", "FBFBFB"]
    merged = json.loads((tmp_path / "run" / "trace" / "merged.json").read_text())
    assert {event["pid"] for event in merged["traceEvents"]} == {0, 1}
