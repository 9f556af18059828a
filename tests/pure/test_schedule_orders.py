"""Owns the published orders: what each must cost and hold, by its paper's formula, for every size.

Imports no torch. p pipeline ranks, v chunks, m microbatches.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import PlanError
from rankmesh.schedule import (
    CHUNKS,
    Action,
    Costs,
    Kind,
    build_schedule,
    check_schedule,
    schedule_text,
    simulate,
    stage_ranks,
)
from rankmesh.topology.plan import SCHEDULES

UNIT = Costs()
P, V, M = st.integers(1, 16), st.integers(1, 4), st.integers(1, 64)
TIMES = st.floats(0.05, 20.0)
# Names with their chunks: any number where the schedule leaves it open.
NAMED = st.sampled_from(sorted(CHUNKS)).flatmap(
    lambda name: st.tuples(st.just(name), V if CHUNKS[name] is None else st.just(CHUNKS[name]))
)


def timed(name, p, m, v=1, costs=UNIT):
    """The timeline of a schedule."""
    return simulate(build_schedule(name, p, v, m), costs)


@given(NAMED, P, M)
def test_every_schedule_passes_the_checker(named, p, m):
    """Field report P03: fewer microbatches than ranks, or no multiple of them, work too."""
    name, v = named
    schedule = build_schedule(name, p, v, m)
    check_schedule(schedule, p * v, m)
    homes = stage_ranks(name, p, v)
    assert all(homes[a.stage] == rank for rank, actions in enumerate(schedule) for a in actions)
    full = name in ("gpipe", "1f1b", "interleaved")
    kinds = {action.kind for actions in schedule for action in actions}
    assert kinds == ({Kind.F, Kind.B} if full else {Kind.F, Kind.I, Kind.W})


@given(st.sampled_from(["gpipe", "1f1b"]), P, M, TIMES, TIMES, TIMES)
def test_gpipe_and_1f1b_idle_for_p_minus_1_microbatches(name, p, m, f, i, w):
    """Narayanan et al. 2021, section 2.2.1: (p - 1) (F + B), whatever F and B are."""
    timeline = timed(name, p, m, costs=Costs(f, i, w))
    assert timeline.makespan == pytest.approx((m + p - 1) * (f + i + w))
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.bubble_stage == pytest.approx(timeline.bubble)
    assert timeline.bubble_over_ideal == pytest.approx((p - 1) / m)
    held = [min(p - r, m) for r in range(p)] if name == "1f1b" else [m] * p
    assert list(timeline.peak_live) == held
    assert timeline.peak_live_w == (0,) * p


@given(P, V, M)
def test_interleaved(p, v, m):
    """Narayanan et al. 2021, section 2.2.2, exact where p divides m, a lower bound elsewhere."""
    timeline = timed("interleaved", p, m, v)
    least = (p - 1) / (v * m + p - 1)
    held = [min(v * m, (v - 1) * p + 2 * (p - 1 - r) + 1) for r in range(p)]
    if m % p == 0:
        assert timeline.bubble == pytest.approx(least)
    assert timeline.bubble > least - 1e-12
    if m % p == 0 or m < p:
        assert list(timeline.peak_live) == held
    assert all(peak <= most for peak, most in zip(timeline.peak_live, held, strict=True))


@given(P, M)
def test_zb_h1_leaves_a_third_of_the_bubble(p, m):
    """Qi et al. 2023, table 2, with F = I = W: p - 1 units where 1F1B has 3 (p - 1), from m = p on;
    and no more activations than the first rank of 1F1B holds.
    """
    split, full = timed("zb-h1", p, m), timed("1f1b", p, m)
    if m >= p:
        assert split.makespan == 3 * m + p - 1
        assert 3 * (split.makespan - 3 * m) == full.makespan - 3 * m
        assert split.bubble == pytest.approx((p - 1) / (3 * m + p - 1))
    assert split.peak_live == full.peak_live
    assert max(split.peak_held) == max(full.peak_live) == min(p, m)


@given(P, M)
def test_zb_h2_has_no_bubble_in_a_ranks_own_window(p, m):
    """Qi et al. 2023, section 2.3: worker i (from 1) holds 2p - 2i + 1 and keeps 2i - 2 for W."""
    timeline = timed("zb-h2", p, m)
    assert timeline.makespan == timed("zb-h1", p, m).makespan
    assert max(timeline.peak_held) <= min(2 * p - 1, m)
    if m >= 2 * p - 1:
        assert timeline.bubble == pytest.approx((p - 1) / (3 * m + p - 1))
        assert timeline.bubble_stage == pytest.approx(0, abs=1e-12)
        assert timeline.peak_live == tuple(2 * (p - r) - 1 for r in range(p))


@given(st.sampled_from(["zb-v", "dualpipe-v"]), P, M)
def test_the_v_shapes(name, p, m):
    """ZB-V holds 2p half activations (Qi et al. 2024), DualPipe-V one more (DeepSeek-V3, table 2);
    both leave p - 1 units of half a stage's F.
    """
    timeline = timed(name, p, m, 2)
    assert max(timeline.peak_held) <= 2 * p + (name == "dualpipe-v")
    if m >= 2 * p - 1:
        assert timeline.makespan == 6 * m + p - 1
        assert timeline.bubble == pytest.approx((p - 1) / (6 * m + p - 1))
        if name == "zb-v":
            assert timeline.bubble_stage == pytest.approx(0, abs=1e-12)


@given(st.sampled_from(["zb-h1", "zb-h2", "zb-v", "dualpipe-v"]), st.integers(2, 16), M)
def test_what_each_rank_holds(name, p, m):
    """The table of docs/schedules.md, from m = 2p - 1 on; dualpipe-v from 2p."""
    m = max(m, 2 * p - (name != "dualpipe-v"))
    timeline = timed(name, p, m, CHUNKS[name])
    live, kept = {
        "zb-h1": ([p - r for r in range(p)], [r + 1 for r in range(p)]),
        "zb-h2": ([2 * (p - r) - 1 for r in range(p)], [2 * r + 1 for r in range(p)]),
        "zb-v": ([2 * p] * p, [2 * r + 1 for r in range(p)]),
        "dualpipe-v": ([2 * p + 1] * p, [r + 1 for r in range(p)]),
    }[name]
    assert (list(timeline.peak_live), list(timeline.peak_live_w)) == (live, kept)
    stage = timeline.bubble if name in ("zb-h1", "dualpipe-v") else 0.0
    assert timeline.bubble_stage == pytest.approx(stage, abs=1e-12)


@given(P, M)
def test_zb_h2_with_few_microbatches_is_zb_h1(p, m):
    m = min(p, m)
    assert build_schedule("zb-h2", p, 1, m) == build_schedule("zb-h1", p, 1, m)


@pytest.mark.parametrize("m", [1, 2, 5])
def test_one_rank_is_plain_accumulation(m):
    """Each microbatch through all stages and back before the next."""
    there = [Action(kind, 0, k) for k in range(m) for kind in (Kind.F, Kind.B)]
    assert build_schedule("1f1b", 1, 1, m) == (tuple(there),)
    looped = build_schedule("interleaved", 1, 3, m)
    words = " ".join(f"F0.{k} F1.{k} F2.{k} B2.{k} B1.{k} B0.{k}" for k in range(m))
    assert schedule_text(looped) == words + "\n"
    assert build_schedule("zb-h1", 1, 1, 1) == ((*map(_first, ("F", "I", "W")),),)


def _first(kind):
    return Action(Kind(kind), 0, 0)


def test_orders_written_out():
    """Two ranks of each split schedule, as in the papers' figures."""
    assert schedule_text(build_schedule("zb-h1", 2, 1, 3)).splitlines() == [
        "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2",
        "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2",
    ]
    assert schedule_text(build_schedule("zb-h2", 2, 1, 3)).splitlines() == [
        "F0.0 F0.1 F0.2 I0.0 W0.0 I0.1 W0.1 I0.2 W0.2",
        "F1.0 I1.0 F1.1 I1.1 F1.2 I1.2 W1.0 W1.1 W1.2",
    ]
    assert schedule_text(build_schedule("zb-v", 2, 2, 3)).splitlines() == [
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2",
        "F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2",
    ]
    assert schedule_text(build_schedule("dualpipe-v", 2, 2, 3)).splitlines() == [
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 F3.2 I0.0 W0.0 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2",
        "F1.0 F2.0 F1.1 F2.1 F1.2 I2.0 W2.0 F2.2 I1.0 W1.0 I2.1 W2.1 I1.1 W1.1 I2.2 I1.2 W2.2 W1.2",
    ]
    assert schedule_text(build_schedule("interleaved", 2, 2, 2)).splitlines() == [
        "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
    ]


def test_names_and_chunks_are_those_of_a_plan():
    """The table of this folder, which may not import topology, says what a plan allows."""
    assert dict(SCHEDULES) == dict(CHUNKS)
    assert stage_ranks("interleaved", 2, 3) == (0, 1, 0, 1, 0, 1)
    assert stage_ranks("zb-v", 3, 2) == stage_ranks("dualpipe-v", 3, 2) == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("1f2b", 2, 1, 2), "schedule '1f2b': allowed are gpipe, 1f1b, interleaved"),
        (("1f1b", 0, 1, 2), "1f1b of 0 ranks, 1 chunk(s) and 2 microbatches: at least 1"),
        (("interleaved", 2, 0, 2), "2 ranks, 0 chunk(s)"),
        (("zb-v", 2, 1, 2), "schedule zb-v runs 2 chunk(s) a rank, not 1"),
        (("gpipe", 4, 1, 8, UNIT, 7), "memory 7: gpipe of 4 ranks, 1 chunk(s) and 8 microbatches "
         "holds 8 activations on rank 0; zb-h1"),
        (("1f1b", 4, 1, 8, UNIT, 0.5), "memory 0.5: a number of at least 1"),
        (("zb-v", 4, 2, 8, UNIT, 1), "memory 1: a rank with 2 chunk(s) holds at least 2"),
        (("zb-h1", 4, 1, 8, UNIT, float("nan")), "memory nan"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(arguments, line):
    with pytest.raises(PlanError) as caught:
        build_schedule(*arguments)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_costs_are_positive_and_finite():
    for name in ("f", "i", "w", "send"):
        for value in (-1.0, float("inf"), float("nan")):
            with pytest.raises(PlanError, match=f"cost {name}"):
                Costs(**{name: value})
    assert Costs(send=0.0) == Costs(1, 1, 1, 0)
    with pytest.raises(PlanError, match="cost w 0"):
        Costs(w=0)
