"""trace/rank-0003.json: the spans of one rank, as Chrome and Perfetto read them.

Owns the names and the form of the files: {"format_version", "rank", "attempt", "displayTimeUnit",
"traceEvents"}. Complete events ("ph": "X") have times in us, the rank as pid and a tid by track:
0 compute, 1 optimizer, from 2 on communication. It knows nothing of what the spans mean.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankmesh.errors import UserError
from rankmesh.obs.jsonfile import FORMAT_VERSION, encode, read_json, write_text
from rankmesh.obs.trace import COMMUNICATION, COMPUTE, OPTIMIZER, TraceSpan

_NAME = re.compile(r"rank-(\d{4,})(?:-(\d+))?\.json")
_TIDS = {COMPUTE: 0, OPTIMIZER: 1}


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded in one attempt, in the order in which it began."""

    rank: int
    attempt: int
    spans: tuple[TraceSpan, ...]

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that it has, ascending."""
        return tuple(sorted({span.step for span in self.spans}))


def trace_folder(run_dir: Path) -> Path:
    """Where the traces of a run lie."""
    return run_dir / "trace"


def trace_path(run_dir: Path, rank: int, attempt: int) -> Path:
    """The file of one rank; attempts after the first have theirs beside it."""
    suffix = f"-{attempt}" if attempt > 1 else ""
    return trace_folder(run_dir) / f"rank-{rank:04}{suffix}.json"


def trace_files(run_dir: Path) -> dict[int, dict[int, Path]]:
    """Attempt -> rank -> file. Raises UserError where the run has none."""
    found: dict[int, dict[int, Path]] = {}
    for path in sorted(trace_folder(run_dir).glob("rank-*.json")):
        name = _NAME.fullmatch(path.name)
        if name is not None:
            found.setdefault(int(name[2] or 1), {})[int(name[1])] = path
    if not found:
        raise UserError(f"{trace_folder(run_dir)}: holds no trace; train with log.trace=true")
    return found


def write_trace(run_dir: Path, trace: RankTrace) -> Path:
    """Write the file of a rank, whole or not at all; returns its path."""
    path = trace_path(run_dir, trace.rank, trace.attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"rank": trace.rank, "attempt": trace.attempt}
    write_text(path, chrome_text(head, [trace], {trace.rank: f"rank {trace.rank}"}))
    return path


def chrome_text(
    head: Mapping[str, object], traces: Iterable[RankTrace], names: Mapping[int, str]
) -> str:
    """The text of a file with the events of these ranks, after `head`; `names` by rank."""
    events = [event for trace in traces for event in _events(trace, names[trace.rank])]
    form = {"format_version": FORMAT_VERSION, **head, "displayTimeUnit": "ms"}
    return encode({**form, "traceEvents": events}) + "\n"


def _events(trace: RankTrace, name: str) -> Iterator[dict[str, Any]]:
    rank, tids = trace.rank, _tids(trace.spans)
    yield _named("process_name", rank, 0, name=name)
    yield _named("process_sort_index", rank, 0, sort_index=rank)
    tracks = {tid: span.track for tid, span in zip(tids, trace.spans, strict=True)}
    for tid, track in sorted(tracks.items()):
        yield _named("thread_name", rank, tid, name=track)
        yield _named("thread_sort_index", rank, tid, sort_index=tid)
    for tid, span in zip(tids, trace.spans, strict=True):
        yield {
            "name": span.name,
            "cat": span.track,
            "ph": "X",
            "ts": span.start / 1000,
            "dur": (span.end - span.start) / 1000,
            "pid": rank,
            "tid": tid,
            "args": {"step": span.step, **span.args},
        }


def _named(what: str, rank: int, tid: int, **args: object) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": tid, "args": args}


def _tids(spans: Sequence[TraceSpan]) -> list[int]:
    """The tid of each span; those of communication follow from its lane."""
    lanes = iter(lanes_of([(s.start, s.end) for s in spans if s.track == COMMUNICATION]))
    return [_TIDS[s.track] if s.track in _TIDS else len(_TIDS) + next(lanes) for s in spans]


def lanes_of(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """A lane for each (start, end), the lowest in which it overlaps no other: viewers draw only
    nested spans on one line.
    """
    lanes = [0] * len(intervals)
    busy: list[tuple[int, int]] = []  # (end, lane)
    free: list[int] = []
    for place in sorted(range(len(intervals)), key=intervals.__getitem__):
        start, end = intervals[place]
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lanes[place] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lanes[place]))
    return lanes


def read_trace(path: Path) -> RankTrace:
    """The spans in a file. Raises UserError that names it where it is damaged."""
    found = read_json(path)
    try:
        events = [event for event in found["traceEvents"] if event["ph"] == "X"]
        spans = sorted((_span(event) for event in events), key=lambda span: span.start)
        return RankTrace(int(found["rank"]), int(found["attempt"]), tuple(spans))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{path}: is no trace of a rank: {error!r}") from error


def _span(event: Mapping[str, Any]) -> TraceSpan:
    args = dict(event["args"])
    start = round(event["ts"] * 1000)
    end = start + round(event["dur"] * 1000)
    if end < start:
        raise ValueError(f"{event['name']} ends before it begins")
    return TraceSpan(event["cat"], event["name"], int(args.pop("step")), start, end, args)
