"""The pass that adds communication to a schedule.

Owns which transfer belongs to which action and where both ends stand; it knows no transport.
"""

from __future__ import annotations

from rankmesh.schedule.actions import UNIT_COSTS, Action, Kind, Schedule
from rankmesh.schedule.timeline import Span, simulate
from rankmesh.schedule.waits import compute_only, homes_of

# The other end of a transfer: its kind, and how far its stage lies from this one's.
_PARTNERS = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}
_SENDS = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.I: Kind.SEND_B}


def partner(action: Action) -> Action:
    """The other end of a communication action: RECV_F 3.0 for SEND_F 2.0."""
    kind, distance = _PARTNERS[action.kind]
    return Action(kind, action.stage + distance, action.microbatch)


def send_of(action: Action) -> Action | None:
    """The SEND of what a compute action makes, were its neighbour elsewhere; None for W."""
    kind = _SENDS.get(action.kind)
    return None if kind is None else Action(kind, action.stage, action.microbatch)


def with_communication(schedule: Schedule) -> Schedule:
    """The schedule with a SEND and a RECV for every tensor that goes from rank to rank.

    One order of all events is made, compute and transfers, in the time of a simulation with unit
    costs: a transfer comes as soon as its producer has ended. Each rank's list is that order, cut
    down to what the rank takes part in, so no two ranks can wait for each other, not even if every
    transfer blocks both ends on its own; and between two ranks all is sent and received in one
    order. Raises PlanError where the ranks of `schedule` wait in a circle.
    """
    plain = compute_only(schedule)
    homes = homes_of(plain)
    # (time, 0 for a transfer that is due or 1 for a compute that starts, microbatch, stage, kind)
    events: list[tuple[tuple[float, int, int, int, str], tuple[tuple[int, Action], ...]]] = []
    for rank, spans in enumerate(simulate(plain, UNIT_COSTS).ranks):
        for span in spans:
            action = Action(span.kind, span.stage, span.microbatch)
            events.append((_key(span.start, 1, span), ((rank, action),)))
            send = send_of(action)
            if send is not None:
                receive = partner(send)
                other = homes.get(receive.stage, rank)
                if other != rank:
                    events.append((_key(span.end, 0, span), ((rank, send), (other, receive))))
    lists: list[list[Action]] = [[] for _ in plain]
    for _, ends in sorted(events, key=lambda event: event[0]):
        for rank, action in ends:
            lists[rank].append(action)
    return tuple(map(tuple, lists))


def _key(time: float, kind: int, span: Span) -> tuple[float, int, int, int, str]:
    return time, kind, span.microbatch, span.stage, span.kind
