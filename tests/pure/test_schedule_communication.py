"""Owns the pass that adds communication: complete, paired, in one order, and free of deadlock.

The judge here shares no code with the checker. Imports no torch.
"""

from collections import defaultdict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.schedule import (
    CHUNKS,
    Costs,
    Kind,
    build_schedule,
    check_schedule,
    partner,
    schedule_text,
    stage_ranks,
    with_communication,
)

WORK = (Kind.F, Kind.B, Kind.I, Kind.W)
SENDS = (Kind.SEND_F, Kind.SEND_B)


def blocked(schedule):
    """Where ranks stand still if every single transfer blocks both of its ends until they meet.

    No buffer, no grouping: the strictest transport there is. Only the order of the lists counts.
    """
    queues = [deque(actions) for actions in schedule]
    heads = {}
    ready = deque(range(len(queues)))
    while ready:
        rank = ready.popleft()
        while queues[rank] and queues[rank][0].kind in WORK:
            queues[rank].popleft()
        if not queues[rank]:
            continue
        action = queues[rank][0]
        other = heads.pop(partner(action), None)
        if other is None:
            heads[action] = rank
            continue
        queues[rank].popleft()
        queues[other].popleft()
        ready += (rank, other)
    return [f"rank {rank} at {queue[0]}" for rank, queue in enumerate(queues) if queue]


def by_pair(schedule, homes, kinds):
    """For each (from, to) the sends, or the receipts written as their sends, in list order."""
    queues = defaultdict(list)
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.kind in kinds:
                other = homes[partner(action).stage]
                send = action if action.kind in SENDS else partner(action)
                queues[(rank, other) if action.kind in SENDS else (other, rank)].append(send)
    return queues


def expect_sound(name, p, v, m, memory=None):
    """Everything that an executor may rely on."""
    plain = build_schedule(name, p, v, m, Costs(), memory)
    schedule = with_communication(plain)
    assert blocked(schedule) == []
    check_schedule(schedule, p * v, m)
    assert tuple(tuple(a for a in rank if a.kind in WORK) for rank in schedule) == plain
    homes = stage_ranks(name, p, v)
    sent = by_pair(schedule, homes, SENDS)
    assert sent == by_pair(schedule, homes, (Kind.RECV_F, Kind.RECV_B))
    crossings = sum(a != b for a, b in zip(homes, homes[1:], strict=False))
    assert sum(map(len, sent.values())) == 2 * crossings * m
    for rank, actions in enumerate(schedule):
        place = {action: number for number, action in enumerate(actions)}
        assert len(place) == len(actions)
        for action in actions:
            if action.kind in SENDS:
                # Nothing but transfers stands between a tensor and its way out.
                made = [a for a in actions[: place[action]] if a.kind in WORK][-1]
                assert (made.stage, made.microbatch) == (action.stage, action.microbatch)
                assert made.kind in ((Kind.F,) if action.kind is Kind.SEND_F else (Kind.B, Kind.I))
                assert homes[action.stage] == rank
            elif action.kind not in WORK:
                kinds = (Kind.F,) if action.kind is Kind.RECV_F else (Kind.B, Kind.I)
                later = [a for a in actions[place[action] :] if a.kind in kinds]
                key = (action.stage, action.microbatch)
                assert key in {(a.stage, a.microbatch) for a in later}


@given(st.sampled_from(sorted(CHUNKS)), st.integers(1, 8), st.integers(1, 4), st.integers(1, 32))
def test_no_two_ranks_wait_for_each_other(name, p, v, m):
    """Field report P12: rendezvous without buffers, 2 to 8 ranks, 1 to 4 chunks, any microbatches.

    Field report P03: as many as there are, fewer than the ranks or no multiple of them.
    """
    expect_sound(name, p, CHUNKS[name] or v, m)


@given(st.sampled_from(["zb-h1", "zb-v"]), st.integers(1, 6), st.integers(1, 16), st.integers(2, 9))
def test_arranged_schedules_too(name, p, m, memory):
    expect_sound(name, p, CHUNKS[name], m, memory)


def test_every_interleaved_schedule_of_the_field_report(full):
    """Field report P12: its whole table with --prove, its corners without."""
    for p in range(2, 9) if full else (2, 5, 8):
        for v in range(1, 5) if full else (2, 4):
            for m in range(p, 4 * p + 1) if full else (p, 2 * p + 1, 4 * p):
                assert not blocked(with_communication(build_schedule("interleaved", p, v, m)))


def test_the_judge_finds_a_deadlock():
    """Both ranks send first: grouped it passes, one by one it cannot."""
    schedule = [list(rank) for rank in with_communication(build_schedule("1f1b", 2, 1, 3))]
    places = [
        {str(action): number for number, action in enumerate(actions)} for actions in schedule
    ]
    for rank, (one, two) in enumerate((("SEND_F0.1", "RECV_B0.0"), ("RECV_F1.1", "SEND_B1.0"))):
        a, b = places[rank][one], places[rank][two]
        if (rank == 0) != (a < b):
            schedule[rank][a], schedule[rank][b] = schedule[rank][b], schedule[rank][a]
    assert blocked(schedule) != []


def test_1f1b_written_out():
    """What a rank sends and receives between two actions stands together."""
    assert schedule_text(with_communication(build_schedule("1f1b", 2, 1, 3))).splitlines() == [
        "F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 B0.0 F0.2 RECV_B0.1 SEND_F0.2 B0.1 RECV_B0.2 B0.2",
        "RECV_F1.0 F1.0 RECV_F1.1 B1.0 SEND_B1.0 F1.1 B1.1 SEND_B1.1 RECV_F1.2 F1.2 B1.2 SEND_B1.2",
    ]


def test_the_bottom_of_a_v_sends_nothing_to_itself():
    """The last rank of a V holds two neighbouring stages."""
    bottom = with_communication(build_schedule("zb-v", 3, 2, 4))[2]
    stages = {a.stage for a in bottom if a.kind in (Kind.SEND_F, Kind.RECV_B)}
    assert stages == {3} and {a.stage for a in bottom} == {2, 3}


def test_adding_it_twice_changes_nothing():
    once = with_communication(build_schedule("interleaved", 3, 2, 4))
    assert with_communication(once) == once


def test_communication_can_fault_only_by_what_it_says():
    with pytest.raises(KeyError):
        partner(build_schedule("1f1b", 1, 1, 1)[0][0])
