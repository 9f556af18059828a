"""Recording, files and clocks of traces, with made-up times."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.config.schema import LogConfig
from rankmesh.errors import ConfigError, UserError
from rankmesh.obs.trace import (
    COMMUNICATION,
    COMPUTE,
    NO_MARK,
    NO_TRACE,
    OPTIMIZER,
    Tracer,
    TraceSpan,
)
from rankmesh.obs.tracefile import (
    RankTrace,
    lanes_of,
    read_trace,
    trace_files,
    trace_path,
    write_trace,
)
from rankmesh.obs.tracemerge import aligned
from tests.traces import action, norm


class Counter:
    """A clock whose ticks are 1, 2, 3 ..., read as thousands."""

    def __init__(self) -> None:
        self.ticks: Iterator[int] = iter(range(1, 1000))

    def begin(self) -> None:
        self.now()

    def now(self) -> int:
        return next(self.ticks)

    def read(self, ticks: Sequence[int]) -> list[int]:
        return [1000 * tick for tick in ticks]


def test_spans_of_the_traced_steps_and_no_others() -> None:
    """A span ends with its block or its `close`, the first one counts; all is written once."""
    written: list[list[TraceSpan]] = []
    tracer = Tracer(range(2, 4), Counter(), lambda spans: written.append(list(spans)))
    assert tracer.open(COMPUTE, "outside") is NO_MARK
    for step in range(1, 6):
        with tracer.step(step), tracer.open(COMPUTE, "F0.0", stage=0):
            hop = tracer.open(COMMUNICATION, "send")
            hop.close()
            hop.close()
            tracer.open(COMMUNICATION, "never ends")
    tracer.close()
    (spans,) = written
    assert [(s.step, s.track, s.name) for s in spans[:3]] == [
        (2, OPTIMIZER, "step"),
        (2, COMPUTE, "F0.0"),
        (2, COMMUNICATION, "send"),
    ]
    assert [s.step for s in spans] == [2, 2, 2, 3, 3, 3]
    step, block, hop_span = spans[:3]
    assert step.start < block.start < hop_span.start < hop_span.end < block.end < step.end
    assert (hop_span.start, hop_span.end) == (4000, 5000)
    assert dict(block.args) == {"stage": 0}


def test_a_step_that_raises_is_not_kept() -> None:
    """What came before it is, as soon as the tracer is closed."""
    written: list[TraceSpan] = []
    with pytest.raises(ValueError, match="amiss"), Tracer(range(1, 9), write=written.extend) as one:
        with one.step(1):
            pass
        with one.step(2):
            raise ValueError("amiss")
    assert [(span.step, span.name) for span in written] == [(1, "step")]
    assert one.open(COMPUTE, "after") is NO_MARK


def test_without_steps_nothing_is_recorded() -> None:
    """The default tracer hands out one and the same mark, which takes no time down."""
    with NO_TRACE.step(1):
        with NO_TRACE.open(COMPUTE, "F0.0", stage=0) as mark:
            assert mark is NO_MARK
        assert mark.end is None
    NO_TRACE.close()
    assert len(NO_TRACE.steps) == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30))
def test_lanes(pairs: list[tuple[int, int]]) -> None:
    """No two spans of a lane overlap, and there are no more lanes than spans at one time."""
    spans = [(start, start + length) for start, length in pairs]
    lanes = lanes_of(spans)
    for a, (start, end) in enumerate(spans):
        for b in range(a):
            if lanes[a] == lanes[b]:
                assert end <= spans[b][0] or spans[b][1] <= start
    depth = max((sum(s <= t < e for s, e in spans) for t in range(71)), default=0)
    assert len(set(lanes)) <= max(depth, 0) + sum(start == end for start, end in spans)
    assert set(lanes) == set(range(len(set(lanes))))


def test_a_file_is_chrome_s_and_comes_back(tmp_path: Path) -> None:
    """Complete events in us with pid and tid; overlapping communication on lines of its own."""
    late = TraceSpan(COMMUNICATION, "send", 1, 900, 2000, {"axis": "pp", "bytes": 8})
    spans = (action("F", 0, 0, 500, 1500), late, norm(1000), norm(3000, step=2))
    trace = RankTrace(3, 1, tuple(sorted(spans, key=lambda span: span.start)))
    path = write_trace(tmp_path, trace)
    assert path == tmp_path / "trace" / "rank-0003.json"
    found = json.loads(path.read_text())
    assert (found["format_version"], found["rank"], found["attempt"]) == (1, 3, 1)
    events = {e["name"]: e for e in found["traceEvents"] if e["ph"] == "X"}
    assert events["F0.0"] == {
        "name": "F0.0", "cat": "compute", "ph": "X", "ts": 0.5, "dur": 1.0, "pid": 3, "tid": 0,
        "args": {"step": 1, "kind": "F", "stage": 0, "microbatch": 0},
    }  # fmt: skip
    places = [(e["ts"], e["tid"]) for e in found["traceEvents"] if e.get("cat") == COMMUNICATION]
    assert sorted(places) == [(0.9, 2), (0.995, 3), (2.995, 2)]
    assert {e["ph"] for e in found["traceEvents"]} == {"X", "M"}
    assert read_trace(path) == trace
    assert trace.steps == (1, 2)


def test_attempts_lie_beside_each_other(tmp_path: Path) -> None:
    """A resume adds files."""
    for attempt in (1, 2, 12):
        for rank in (0, 12345):
            write_trace(tmp_path, RankTrace(rank, attempt, (norm(9),)))
    (tmp_path / "trace" / "merged.json").write_text("{}")
    found = trace_files(tmp_path)
    assert {attempt: sorted(ranks) for attempt, ranks in found.items()} == {
        1: [0, 12345], 2: [0, 12345], 12: [0, 12345],
    }  # fmt: skip
    assert found[2][0].name == "rank-0000-2.json"
    assert trace_path(tmp_path, 12345, 1).name == "rank-12345.json"
    assert read_trace(found[12][12345]).attempt == 12


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", '{"format_version": 1}', '{"format_version": 2, "traceEvents": []}',
        '{"format_version": 1, "rank": 0, "attempt": 1, "traceEvents": [{"ph": "X"}]}',
        '{"format_version": 1, "rank": 0, "attempt": 1, "traceEvents": [7]}',
        '{"format_version": 1, "rank": 0, "attempt": 1, "traceEvents": [{"ph": "X", "name": "F", '
        '"cat": "compute", "ts": 2, "dur": -1, "pid": 0, "tid": 0, "args": {"step": 1}}]}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    """Whatever is wrong with it."""
    path = tmp_path / "rank-0000.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"rank-0000\.json"):
        read_trace(path)


def _trace(rank: int, *spans: TraceSpan) -> RankTrace:
    return RankTrace(rank, 1, spans)


def test_ranks_of_one_host_are_not_moved_against_each_other() -> None:
    """Their clock is one; a rank that leaves the all-reduce late is late."""
    traces = [_trace(0, norm(1000)), _trace(1, action("F", 0, 0, 400, 500), norm(1300))]
    made = aligned(traces, {0: "a", 1: "a"})
    assert [[(s.start, s.end) for s in trace.spans] for trace in made] == [
        [(595, 600)],
        [(0, 100), (895, 900)],
    ]
    assert aligned([], {}) == []


def test_hosts_meet_at_the_end_of_the_norm() -> None:
    """Each step by itself; of a host the rank that was least delayed counts."""
    traces = [
        _trace(0, action("F", 0, 0, 0, 100), norm(1000), norm(2000, step=2)),
        _trace(1, action("F", 1, 0, 7050, 7150), norm(8000), norm(9010, step=2)),
        _trace(2, norm(8040), norm(9050, step=2)),
    ]
    first, second, third = aligned(traces, {0: "a", 1: "b", 2: "b"})
    assert [span.end for span in first.spans] == [100, 1000, 2000]
    assert [span.end for span in second.spans] == [150, 1000, 2000]
    assert [span.end for span in third.spans] == [1040, 2040]


def test_a_step_that_cannot_be_aligned_is_left_out() -> None:
    """One host has no norm in it."""
    traces = [
        _trace(0, norm(1000), action("F", 0, 0, 1, 2, step=2)),
        _trace(1, norm(50), norm(60, step=2)),
    ]
    made = aligned(traces, {0: "a", 1: "b"})
    assert [trace.steps for trace in made] == [(1,), (1,)]


def test_the_window_of_steps_is_checked() -> None:
    """First and last, from 1 on."""
    assert LogConfig(trace=True, trace_steps=(3, 3)).trace_steps == (3, 3)
    bad: list[Any] = [(4, 3), (0, 3)]
    for steps in bad:
        with pytest.raises(ConfigError, match=r"log\.trace_steps"):
            LogConfig(trace=True, trace_steps=steps)
