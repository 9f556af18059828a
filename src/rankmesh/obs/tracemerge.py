"""The traces of several ranks on one clock.

Owns the alignment of hosts. All ranks leave the world all-reduce that agrees on a step's norm at
the same time, whatever their clocks say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rankmesh.obs.trace import COMMUNICATION, TraceSpan
from rankmesh.obs.tracefile import RankTrace

# (host, step) -> ns to add
_Shifts = Mapping[tuple[str, int], int]


def aligned(traces: Sequence[RankTrace], hosts: Mapping[int, str]) -> list[RankTrace]:
    """The traces with all times on the clock of the first one's host, counted from the first
    start. hosts: by rank.

    Ranks of one host share a clock and are not moved against each other. Between hosts each step
    is moved by itself, since clocks drift; a step without a norm on each host is left out.
    """
    if not traces:
        return []
    shifts = _shifts(traces, hosts)
    moved = [
        replace(trace, spans=tuple(_moved(trace.spans, hosts[trace.rank], shifts)))
        for trace in traces
    ]
    begin = min((span.start for trace in moved for span in trace.spans), default=0)
    return [
        replace(trace, spans=tuple(_shift(span, -begin) for span in trace.spans)) for trace in moved
    ]


def _shifts(traces: Sequence[RankTrace], hosts: Mapping[int, str]) -> _Shifts:
    """What to add on each host in each step that can be aligned."""
    names = dict.fromkeys(hosts[trace.rank] for trace in traces)
    first = next(iter(names))
    if len(names) == 1:
        return {(first, span.step): 0 for trace in traces for span in trace.spans}
    ends: dict[tuple[str, int], int] = {}
    for trace in traces:
        for span in filter(_is_norm, trace.spans):
            # Of the ranks of a host the one that was least delayed.
            place = (hosts[trace.rank], span.step)
            ends[place] = min(ends.get(place, span.end), span.end)
    steps = {step for _, step in ends if all((name, step) in ends for name in names)}
    return {(name, step): ends[first, step] - ends[name, step] for name in names for step in steps}


def _is_norm(span: TraceSpan) -> bool:
    return span.track == COMMUNICATION and span.args.get("phase") == "norm"


def _moved(spans: Sequence[TraceSpan], host: str, shifts: _Shifts) -> list[TraceSpan]:
    return [_shift(span, shifts[host, span.step]) for span in spans if (host, span.step) in shifts]


def _shift(span: TraceSpan, ns: int) -> TraceSpan:
    return replace(span, start=span.start + ns, end=span.end + ns)
