"""Owns what is arranged for costs and a memory limit: right, within the limit, no worse, quick.

Imports no torch.
"""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.schedule import Costs, build_schedule, check_schedule, simulate

TIMES = st.floats(0.01, 100.0)
COSTS = st.builds(Costs, TIMES, TIMES, TIMES, st.floats(0.0, 50.0))


@given(
    st.sampled_from([("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)]),
    st.integers(1, 8), st.integers(1, 24), COSTS, st.integers(0, 30),
)  # fmt: skip
def test_any_costs_and_limit_give_a_right_schedule(named, p, m, costs, more):
    """Even a limit of one activation a chunk: the pipeline then runs one microbatch at a time."""
    name, v = named
    schedule = build_schedule(name, p, v, m, costs, v + more)
    check_schedule(schedule, p * v, m)
    assert max(simulate(schedule, costs).peak_held) <= v + more


@given(st.integers(1, 8), st.integers(1, 24), COSTS)
def test_it_is_never_slower_than_the_published_order(p, m, costs):
    """Within the memory of each."""
    for name, v, memory in (("zb-h1", 1, p), ("zb-h2", 1, 2 * p - 1), ("zb-v", 2, 2 * p)):
        arranged = simulate(build_schedule(name, p, v, m, costs, memory), costs)
        published = simulate(build_schedule(name, p, v, m), costs)
        assert arranged.makespan <= published.makespan


def test_a_larger_limit_helps():
    """Nobody gains by less memory; the smallest limit is one microbatch at a time."""
    found = [
        simulate(build_schedule("zb-h1", 4, 1, 12, Costs(), memory), Costs()).makespan
        for memory in (1, 2, 3, 4, 7)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] == 12 * (4 + 4 + 1) and found[-1] == 3 * 12 + 3


def test_a_limit_need_not_be_whole():
    """7.9 activations are 7."""
    assert build_schedule("zb-h2", 4, 1, 9, Costs(), 7.9) == build_schedule(
        "zb-h2", 4, 1, 9, Costs(), 7
    )
    build = build_schedule("zb-v", 3, 2, 9, Costs(2, 1, 1), float("inf"))
    check_schedule(build, 6, 9)


@pytest.mark.parametrize(("name", "v"), [("zb-h1", 1), ("zb-v", 2)])
def test_it_is_quick(name, v):
    """16 ranks and 64 microbatches take about 0.1 to 0.3 s; ten times that is allowed here, for
    the machine may be busy.
    """
    begin = time.process_time()
    build_schedule(name, 16, v, 64, Costs(1.1, 1.0, 0.7, 0.1), 20)
    assert time.process_time() - begin < 3.0
