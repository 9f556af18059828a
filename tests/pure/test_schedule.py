"""Owns 1F1B and the checker: right schedules pass, each kind of fault is named.

Imports no torch.
"""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import PlanError
from rankmesh.schedule import Action, Kind, build_schedule, check_schedule


def parse(text):
    """A schedule from words such as "F0.1 B0.1", one line a pipeline rank."""
    return tuple(
        tuple(
            Action(
                Kind(word.rstrip("0123456789.")), *map(int, word.lstrip("FBIWSENDRCV_").split("."))
            )
            for word in line.split()
        )
        for line in text.strip().splitlines()
    )


# Two ranks, one stage and two microbatches each, with communication: rank 0, then rank 1.
FIRST = "F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 B0.0 RECV_B0.1 B0.1"
SECOND = "RECV_F1.0 F1.0 B1.0 RECV_F1.1 SEND_B1.0 F1.1 B1.1 SEND_B1.1"


def test_one_stage_is_gradient_accumulation():
    assert build_schedule("1f1b", 1, 1, 3) == parse("F0.0 B0.0 F0.1 B0.1 F0.2 B0.2")


def test_three_stages():
    assert build_schedule("1f1b", 3, 1, 4) == parse(
        """
        F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3
        F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3
        F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3
        """
    )


def test_an_action_is_a_plain_value():
    action = Action(Kind.F, 1, 2)
    assert str(action) == "F1.2" and action == Action(Kind("F"), 1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        action.stage = 0


@given(st.integers(1, 16), st.integers(1, 64))
def test_one_f_one_b_is_complete_and_holds_few_activations(stages, microbatches):
    schedule = build_schedule("1f1b", stages, 1, microbatches)
    check_schedule(schedule, stages, microbatches)
    for rank, actions in enumerate(schedule):
        live = peak = 0
        for action in actions:
            live += 1 if action.kind is Kind.F else -1
            peak = max(peak, live)
        assert peak == min(stages - rank, microbatches) and live == 0


@given(st.integers(2, 5), st.integers(1, 6), st.data())
def test_a_lost_or_doubled_action_is_found(stages, microbatches, data):
    schedule = [list(actions) for actions in build_schedule("1f1b", stages, 1, microbatches)]
    rank = data.draw(st.integers(0, stages - 1))
    place = data.draw(st.integers(0, 2 * microbatches - 1))
    action = schedule[rank][place]
    if data.draw(st.booleans()):
        del schedule[rank][place]
    else:
        schedule[rank].append(action)
    with pytest.raises(PlanError, match=f"stage {action.stage}, microbatch {action.microbatch}:"):
        check_schedule(tuple(map(tuple, schedule)), stages, microbatches)


@pytest.mark.parametrize(
    ("text", "stages", "line"),
    [
        ("B0.0 F0.0", 1, "waits for itself: rank 0 at B0.0"),
        ("F0.0 W0.0 I0.0", 1, "waits for itself: rank 0 at W0.0"),
        ("F0.0 F0.1 B0.1 B0.0\nF1.0 B1.0 F1.1 B1.1", 2, None),
        ("F0.0 B0.0 F0.1 B0.1\nF1.0 F1.1 B1.1 B1.0", 2, "rank 0 at B0.0, rank 1 at F1.1"),
        ("F0.0 B0.0 F1.0 B1.0", 2, "rank 0 at B0.0"),
        ("F0.0 F1.0 B1.0 I0.0 W0.0", 2, None),
        ("F0.0 F1.0 I1.0 W1.0 B0.0", 2, None),
        ("F0.0 I0.0", 1, "found F 1, B 0, I 1, W 0"),
        ("F0.0 B0.0 I0.0 W0.0", 1, "found F 1, B 1, I 1, W 1"),
        ("F0.0 F1.0 B1.0\nB0.0", 2, "stage 0 stands on several pipeline ranks: [0, 1]"),
        ("F0.0 B0.0 F1.0 B1.0", 1, "F1.0 is outside 1 stages and 1 microbatches"),
        ("F0.0 SEND_F0.0 RECV_B0.0 B0.0\nRECV_F1.0 F1.0 B1.0 SEND_B1.0", 2, None),
    ],
)
def test_faults_are_named(text, stages, line):
    schedule = parse(text)
    microbatches = 1 + max(action.microbatch for actions in schedule for action in actions)
    if line is None:
        check_schedule(schedule, stages, microbatches)
        return
    with pytest.raises(PlanError) as caught:
        check_schedule(schedule, stages, microbatches)
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rank", "old", "new", "line"),
    [
        (0, "", "", None),
        # One by one both ranks would send first and wait for ever; together they pass.
        (1, "RECV_F1.1 SEND_B1.0", "SEND_B1.0 RECV_F1.1", None),
        (1, "RECV_F1.1 SEND_B1.0 F1.1", "SEND_B1.0 F1.1 RECV_F1.1", "rank 1 at F1.1"),
        (0, "F0.0 SEND_F0.0", "SEND_F0.0 F0.0", "rank 0 at SEND_F0.0, rank 1 at RECV_F1.0"),
        (0, "RECV_B0.0 B0.0", "B0.0 RECV_B0.0", "waits for itself: rank 0 at B0.0"),
        (0, "SEND_F0.1 ", "", "SEND_F0.1: found 0, needed 1"),
        (0, "SEND_F0.1", "SEND_F0.1 SEND_F0.1", "SEND_F0.1: found 2, needed 1"),
        (1, "RECV_F1.1 ", "", "rank 0 sends 2 tensors to rank 1, which receives 1"),
        (1, "RECV_F1.0 F1.0", "RECV_F1.1 F1.0", "sends SEND_F0.0 where rank 1 receives RECV_F1.1"),
        (0, "RECV_B0.1 B0.1", "RECV_B0.1 B0.1 SEND_B0.1", "SEND_B0.1 on rank 0 has no partner"),
        (1, "F1.1", "F1.1 SEND_F0.0", "SEND_F0.0 on rank 1 has no partner"),
    ],
)
def test_faults_of_communication_are_named(rank, old, new, line):
    lines = [FIRST, SECOND]
    assert old in lines[rank]
    lines[rank] = lines[rank].replace(old, new, 1)
    schedule = parse("\n".join(lines))
    if line is None:
        check_schedule(schedule, 2, 2)
        return
    with pytest.raises(PlanError) as caught:
        check_schedule(schedule, 2, 2)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_an_error_names_a_few_ranks():
    """A line of a thousand ranks helps nobody."""
    schedule = tuple((Action(Kind.B, rank, 0), Action(Kind.F, rank, 0)) for rank in range(20))
    with pytest.raises(PlanError, match="rank 0 at B0.0, .*, rank 7 at B7.0, 12 ranks more$"):
        check_schedule(schedule, 20, 1)


def test_numbers_below_one_are_refused():
    for stages, microbatches in ((0, 1), (1, 0)):
        with pytest.raises(
            PlanError, match=f"1f1b of {stages} ranks.* {microbatches} microbatches"
        ):
            build_schedule("1f1b", stages, 1, microbatches)
