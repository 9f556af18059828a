"""Owns random plans and an oracle of ranks and groups that shares no code with `topology`.

The oracle counts ranks in nested loops and compares coordinates one by one; it must not import
numpy or anything of `rankmesh.topology` but the plan.
"""

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st

from rankmesh.topology.plan import DENSE_AXES, ParallelPlan

Place = dict[str, int]
SIZES = st.sampled_from([1, 1, 2, 2, 3, 4])


def thousands() -> settings:
    """For properties that must hold over thousands of plans even in the fast tier."""
    return settings(max_examples=max(1000, settings().max_examples))


def divisors(total: int) -> list[int]:
    return [value for value in range(1, total + 1) if total % value == 0]


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    """Any legal plan of at most 256 ranks: every axis, order, expert view, ZeRO group, schedule."""
    tp, cp, dp = (draw(SIZES) for _ in range(3))
    pp = draw(st.sampled_from([1, 2, 3, 4]))
    stage = tp * cp * dp
    etp = draw(st.sampled_from(divisors(stage)))
    ep = draw(st.sampled_from(divisors(stage // etp)))
    edp = stage // (etp * ep)
    fitting = [z for z in divisors(dp * cp) if edp % (dp * cp // z) == 0]
    kind = draw(st.sampled_from(["ring", "all-gather", "ulysses"]))
    ulysses = {"ring": divisors(cp), "all-gather": [1], "ulysses": [1, cp]}[kind]
    schedule, chunks = draw(
        st.sampled_from([("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-v", 2)])
    )
    return ParallelPlan(
        tp=tp,
        cp=cp,
        dp=dp,
        pp=pp,
        etp=etp,
        ep=ep,
        zero=draw(st.sampled_from([0, 1, 2, 3])),
        zero_group=draw(st.sampled_from([None, *fitting])),
        cp_kind=kind,
        cp_ulysses=draw(st.sampled_from(ulysses)),
        schedule=schedule,
        num_chunks=chunks,
        order=tuple(draw(st.permutations(DENSE_AXES))),
    )


def oracle_places(plan: ParallelPlan) -> list[Place]:
    """Rank -> its coordinate along all seven axes, by counting."""
    a, b, c, d = plan.order
    size = {"tp": plan.tp, "cp": plan.cp, "dp": plan.dp, "pp": plan.pp}
    places: list[Place] = []
    for at_d in range(size[d]):
        for at_c in range(size[c]):
            for at_b in range(size[b]):
                for at_a in range(size[a]):
                    places.append({a: at_a, b: at_b, c: at_c, d: at_d})
    for stage in range(plan.pp):
        members = iter([place for place in places if place["pp"] == stage])
        edp = plan.tp * plan.cp * plan.dp // (plan.ep * plan.etp)
        for at_edp in range(edp):
            for at_ep in range(plan.ep):
                for at_etp in range(plan.etp):
                    next(members).update(etp=at_etp, ep=at_ep, edp=at_edp)
    return places


def oracle_groups(
    places: list[Place], axes: Iterable[str], fixed: Iterable[str]
) -> list[list[int]]:
    """Ranks that agree on every axis of their view, `fixed`, that is not one of `axes`."""
    held = [axis for axis in fixed if axis not in set(axes)]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault(tuple(place[axis] for axis in held), []).append(rank)
    return sorted(found.values())
