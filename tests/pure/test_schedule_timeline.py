"""Owns the simulator and its figures: by hand, and the same for measured times.

Imports no torch.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import PlanError
from rankmesh.schedule import (
    Action,
    Costs,
    Kind,
    Span,
    Timeline,
    build_schedule,
    simulate,
    with_communication,
)
from rankmesh.schedule.waits import Waits, play

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741


def test_two_stages_by_hand():
    """F 2, B 3 + 4, a transfer 10: it delays the receiver and occupies nobody."""
    timeline = simulate(build_schedule("1f1b", 2, 1, 2), Costs(2, 3, 4, 10))
    assert timeline.ranks == (
        (Span(F, 0, 0, 0, 2), Span(F, 0, 1, 2, 4), Span(B, 0, 0, 31, 38), Span(B, 0, 1, 40, 47)),
        (
            Span(F, 1, 0, 12, 14),
            Span(B, 1, 0, 14, 21),
            Span(F, 1, 1, 21, 23),
            Span(B, 1, 1, 23, 30),
        ),
    )
    assert timeline.makespan == 47
    assert timeline.bubble == pytest.approx(1 - 18 / 47)
    assert timeline.bubble_stage == pytest.approx(1 - 18 / 47)
    assert timeline.bubble_over_ideal == pytest.approx(29 / 18)
    assert timeline.peak_live == (2, 1) and timeline.peak_live_w == (0, 0)


def test_stages_on_one_rank_need_no_transfer():
    """The turn of a V is free."""
    timeline = simulate(build_schedule("zb-v", 1, 2, 1), Costs(1, 1, 1, 100))
    assert timeline.makespan == 6 and timeline.bubble == 0


def test_live_activations_end_with_i_and_what_w_needs_with_w():
    """F F I F I W I W W: at most two activations, at most two kept."""
    words = ((F, 0), (F, 1), (I, 0), (F, 2), (I, 1), (W, 0), (I, 2), (W, 1), (W, 2))
    timeline = simulate((tuple(Action(kind, 0, k) for kind, k in words),), Costs())
    assert timeline.peak_live == (2,) and timeline.peak_live_w == (2,)
    assert timeline.peak_held == (3,)


def test_measured_times():
    """Arbitrary times, a clock that starts anywhere, communication that counts for nothing."""
    timeline = Timeline(
        (
            (Span(F, 0, 0, 100.5, 101.0), Span(Kind.SEND_F, 0, 0, 101.0, 104.0),
             Span(B, 0, 0, 103.5, 104.5)),
            (Span(F, 1, 0, 101.25, 101.75), Span(B, 1, 0, 102.0, 103.0)),
        )
    )  # fmt: skip
    assert timeline.makespan == 4.0
    assert timeline.bubble == pytest.approx(1 - 3.0 / 8.0)
    assert timeline.bubble_stage == pytest.approx(1 - 1.5 / 4.0)
    assert timeline.bubble_over_ideal == pytest.approx(2.5 / 1.5)


def test_an_empty_timeline_is_no_division_by_zero():
    for timeline in (Timeline(()), Timeline(((), ()))):
        assert timeline.makespan == timeline.bubble == timeline.bubble_stage == 0
        assert timeline.bubble_over_ideal == 0


@given(
    st.sampled_from(["1f1b", "zb-h1", "zb-h2"]), st.integers(1, 6), st.integers(1, 12),
    st.tuples(*[st.floats(0.01, 9.0)] * 4),
)  # fmt: skip
def test_figures_agree_with_each_other(name, p, m, costs):
    """The three figures are three views of the same idle time."""
    schedule = build_schedule(name, p, 1, m)
    timeline = simulate(schedule, Costs(*costs))
    assert timeline == simulate(with_communication(schedule), Costs(*costs))
    work = m * sum(costs[:3])
    assert timeline.bubble == pytest.approx(1 - work / timeline.makespan, abs=1e-9)
    assert timeline.bubble_over_ideal == pytest.approx(timeline.makespan / work - 1, abs=1e-9)
    assert timeline.bubble_stage <= timeline.bubble + 1e-9
    for spans in timeline.ranks:
        assert all(a.end <= b.start for a, b in zip(spans, spans[1:], strict=False))


def test_as_plain_values():
    """What --json prints."""
    found = simulate(build_schedule("zb-h1", 1, 1, 1), Costs()).to_dict()
    assert json.loads(json.dumps(found)) == {
        "bubble": 0.0, "bubble_stage": 0.0, "bubble_over_ideal": 0.0, "peak_live": [1],
        "peak_live_w": [1], "makespan": 3.0,
        "actions": [[["F", 0, 0, 0.0, 1.0], ["I", 0, 0, 1.0, 2.0], ["W", 0, 0, 2.0, 3.0]]],
    }  # fmt: skip


def test_a_circle_is_named():
    with pytest.raises(PlanError, match="waits for itself: rank 0 at B0.0"):
        simulate(((Action(B, 0, 0), Action(F, 0, 0)),), Costs())


def test_a_chain_over_many_ranks_is_played_in_a_few_sweeps() -> None:
    """2,000 ranks, one microbatch: forward down, backward up."""
    looked = 0
    schedule = build_schedule("1f1b", 2000, 1, 1)
    waits, ended = Waits(schedule), set[Action]()

    def able(rank: int, place: int, action: Action) -> bool:
        nonlocal looked
        looked += 1
        if not ended.issuperset(waits(action)):
            return False
        ended.add(action)
        return True

    play(schedule, able)
    assert len(ended) == 4000 and looked < 20_000
