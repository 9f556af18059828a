"""Checks of pipeline schedules: orders, times, communication, the checker, the memory limit.

Each runs in one worker process and raises AssertionError with a message of its own. It must not
import torch: what it judges does not either.
"""

from __future__ import annotations

from rankmesh.errors import PlanError
from rankmesh.schedule import (
    Action,
    Costs,
    Kind,
    Schedule,
    build_schedule,
    check_schedule,
    simulate,
    with_communication,
)
from rankmesh.testing.worker import Worker


def _sound(schedule: Schedule, stages: int, microbatches: int, what: str) -> None:
    try:
        check_schedule(schedule, stages, microbatches)
    except PlanError as error:
        raise AssertionError(f"{what}: {error}") from None


def _equal(what: str, found: object, expected: object) -> None:
    assert found == expected, f"{what} {found}, expected {expected}"


def orders(worker: Worker) -> None:
    """The formulas of docs/schedules.md for 4 ranks."""
    p, m = 4, 8
    for name, v, makespan, live in (
        ("gpipe", 1, 3 * (m + p - 1), (m,) * p),
        ("1f1b", 1, 3 * (m + p - 1), (4, 3, 2, 1)),
        ("interleaved", 2, 3 * (2 * m + p - 1), (11, 9, 7, 5)),
        ("zb-h1", 1, 3 * m + p - 1, (4, 3, 2, 1)),
        ("zb-h2", 1, 3 * m + p - 1, (7, 5, 3, 1)),
        ("zb-v", 2, 6 * m + p - 1, (8,) * p),
        ("dualpipe-v", 2, 6 * m + p - 1, (9,) * p),
    ):
        schedule = build_schedule(name, p, v, m)
        _sound(schedule, p * v, m, f"orders: {name}")
        timeline = simulate(schedule, Costs())
        _equal(f"orders: {name} holds", timeline.peak_live, live)
        _equal(f"orders: {name} takes", timeline.makespan, makespan)
    for m in range(1, 20):
        try:
            simulate(build_schedule("interleaved", 9, 2, m), Costs())
        except PlanError as error:
            raise AssertionError(f"orders: {m} microbatches: {error}") from None


def times(worker: Worker) -> None:
    """Two stages and the turn of a V, by hand; the figures of ZB-H2."""
    timeline = simulate(build_schedule("1f1b", 2, 1, 2), Costs(2, 3, 4, 10))
    starts = [[span.start for span in spans] for spans in timeline.ranks]
    _equal("times: starts", starts, [[0, 2, 31, 40], [12, 14, 21, 23]])
    _equal("times: makespan", timeline.makespan, 47)
    turn = simulate(build_schedule("zb-v", 1, 2, 1), Costs(1, 1, 1, 100))
    _equal("times: turn of a V", turn.makespan, 6)
    late = simulate(build_schedule("zb-h2", 4, 1, 8), Costs())
    _equal("times: bubble_stage", round(late.bubble_stage, 9), 0)
    _equal("times: bubble", round(late.bubble, 9), round(3 / 27, 9))
    _equal("times: kept for W", late.peak_live_w, (1, 3, 5, 7))


def communication(worker: Worker) -> None:
    """What the pass makes is complete and passes the checker."""
    for name, p, v, m in (("1f1b", 4, 1, 6), ("interleaved", 3, 3, 7), ("zb-v", 3, 2, 6)):
        schedule = with_communication(build_schedule(name, p, v, m))
        _sound(schedule, p * v, m, f"communication: {name}")
        crossings = p * v - 1 - (name == "zb-v")
        count = sum(len(actions) for actions in schedule) - p * v * m * (3 if v == 2 else 2)
        _equal(f"communication: transfers of {name}", count, 4 * crossings * m)


def _refused(what: str, *ranks: str) -> None:
    words = [[word.rpartition(".") for word in rank.split()] for rank in ranks]
    schedule = tuple(
        tuple(
            Action(Kind(head.rstrip("01")), int(head[-1]), int(number)) for head, _, number in rank
        )
        for rank in words
    )
    try:
        check_schedule(schedule, 2, 2)
    except PlanError:
        return
    raise AssertionError(f"checker: {what} passes")


def checker(worker: Worker) -> None:
    """Faults of communication are refused."""
    first = "F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 B0.0 RECV_B0.1 B0.1"
    second = "RECV_F1.0 F1.0 B1.0 RECV_F1.1 SEND_B1.0 F1.1 B1.1 SEND_B1.1"
    swapped = second.replace("RECV_F1.0 F1.0 B1.0 RECV_F1.1", "RECV_F1.1 RECV_F1.0 F1.0 B1.0")
    _refused("another order at the other end", first, swapped)
    early = "F0.0 SEND_F0.0 F0.1 RECV_B0.0 B0.0 SEND_F0.1 RECV_B0.1 B0.1"
    late = "RECV_F1.0 F1.0 B1.0 RECV_F1.1 F1.1 B1.1 SEND_B1.0 SEND_B1.1"
    _refused("a circle of transfers", early, late)
    _refused("a tensor sent twice", f"{first} SEND_F0.1", f"{second} RECV_F1.1")
    hasty = first.replace("F0.0 SEND_F0.0", "SEND_F0.0 F0.0")
    _refused("a tensor sent before it is there", hasty, second)


def memory(worker: Worker) -> None:
    """A limit is kept, down to one microbatch at a time."""
    for name, v in (("zb-h1", 1), ("zb-v", 2)):
        for limit in (v, 5):
            schedule = build_schedule(name, 4, v, 8, Costs(1.5, 1.0, 0.5, 0.1), limit)
            _sound(schedule, 4 * v, 8, f"memory: {name} within {limit}")
            held = max(simulate(schedule, Costs()).peak_held)
            assert held <= limit, f"memory: {name} holds {held}, allowed are {limit}"
