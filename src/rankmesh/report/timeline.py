"""Measured timelines of a pipeline, and their simulation from what earlier steps took.

Owns the way from the spans of ranks to a timeline and to costs. Figures and pictures are those of
any timeline; files and clocks are `obs`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rankmesh.errors import UserError
from rankmesh.obs.trace import COMPUTE, TraceSpan
from rankmesh.obs.tracefile import RankTrace
from rankmesh.schedule import Action, Costs, Kind, Schedule, Span, Timeline, actions, simulate
from rankmesh.schedule.waits import Waits


@dataclass(frozen=True)
class MeasuredCosts:
    """Medians over steps, in ms: of each kind and stage; of what passes between the end of an
    action and the start of one on another rank that waited for nothing else.
    """

    actions: Mapping[tuple[Kind, int], float]
    send: float


def measured(traces: Sequence[RankTrace], step: int) -> Timeline:
    """The timeline of a step, in ms from its first start; traces: of one replica, by pipeline rank.

    Raises UserError that names the rank where it has no action in the step, or one twice, inside
    another or without its kind, stage or microbatch.
    """
    begin = min((s.start for trace in traces for s in _actions(trace, step)), default=0)
    return Timeline(tuple(tuple(_spans(trace, step, begin)) for trace in traces))


def _actions(trace: RankTrace, step: int) -> list[TraceSpan]:
    return [span for span in trace.spans if span.track == COMPUTE and span.step == step]


def _spans(trace: RankTrace, step: int, begin: int) -> Iterator[Span]:
    """Of one rank, in order; begin: ns that count as 0."""
    found = sorted(_actions(trace, step), key=lambda span: span.start)
    if not found:
        raise UserError(f"step {step}: rank {trace.rank} recorded no action")
    end, seen = begin, set()
    for span in found:
        key = tuple(span.args.get(name) for name in ("kind", "stage", "microbatch"))
        kind, stage, microbatch = key
        sound = kind in actions.COMPUTE and isinstance(stage, int) and isinstance(microbatch, int)
        if not sound or key in seen or span.start < end:
            raise UserError(f"step {step}: rank {trace.rank} recorded {span.name} amiss")
        seen.add(key)
        end = span.end
        start_ms, end_ms = (span.start - begin) / 1e6, (span.end - begin) / 1e6
        yield Span(Kind(str(kind)), int(stage or 0), int(microbatch or 0), start_ms, end_ms)


def order_of(timeline: Timeline) -> Schedule:
    """What every pipeline rank did, in order: the very schedule of the step."""
    return tuple(
        tuple(Action(span.kind, span.stage, span.microbatch) for span in spans)
        for spans in timeline.ranks
    )


def costs_of(timelines: Sequence[Timeline]) -> MeasuredCosts:
    """What the actions and transfers of these steps took."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    gaps: list[float] = []
    for timeline in timelines:
        gaps += _gaps(timeline)
        for span in (span for spans in timeline.ranks for span in spans):
            times[span.kind, span.stage].append(span.end - span.start)
    actions = {key: median(found) for key, found in times.items()}
    return MeasuredCosts(actions, median(gaps) if gaps else 0.0)


def _gaps(timeline: Timeline) -> Iterator[float]:
    """From the end of what an action needs from another rank to its start, where its own rank was
    idle by then.
    """
    waits = Waits(order_of(timeline))
    ends = {
        Action(span.kind, span.stage, span.microbatch): (span.end, rank)
        for rank, spans in enumerate(timeline.ranks)
        for span in spans
    }
    for rank, spans in enumerate(timeline.ranks):
        free = 0.0
        for span in spans:
            needs = waits(Action(span.kind, span.stage, span.microbatch))
            end, home = max((ends[need] for need in needs), default=(0.0, rank))
            if home != rank and end >= free:
                yield max(0.0, span.start - end)
            free = span.end


def simulated(timeline: Timeline, costs: MeasuredCosts) -> Timeline:
    """The step as it would be if each action took what `costs` says and nothing stood in its way.

    Raises UserError where `costs` lacks an action.
    """

    def duration(action: Action) -> float:
        key = (action.kind, action.stage)
        if key not in costs.actions:
            raise UserError(f"no earlier step has {action.kind} of stage {action.stage}")
        return costs.actions[key]

    return simulate(order_of(timeline), Costs(send=costs.send), duration)
