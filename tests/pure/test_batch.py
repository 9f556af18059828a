"""Owns the split of the global batch over replicas and microbatches. Imports no torch."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import PlanError
from rankmesh.topology import BatchPlan


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 9))
def test_every_sample_once_and_padding_counted(global_batch, dp, microbatch):
    batch = BatchPlan(global_batch, dp, microbatch)
    steps = [
        [batch.rows(replica, index) for index in range(batch.num_microbatches)]
        for replica in range(dp)
    ]
    rows = list(itertools.chain.from_iterable(itertools.chain.from_iterable(steps)))
    assert sorted(rows) == list(range(global_batch))
    missing = sum(microbatch - len(found) for found in itertools.chain.from_iterable(steps))
    assert batch.num_padding == missing
    # No microbatch is padding on all replicas: it would be work for nothing.
    for index in range(batch.num_microbatches):
        assert any(steps[replica][index] for replica in range(dp))


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 6))
def test_a_microbatch_holds_neighbouring_rows(global_batch, dp, microbatch):
    batch = BatchPlan(global_batch, dp, microbatch)
    for index, replica in itertools.product(range(batch.num_microbatches), range(dp)):
        start = (index * dp + replica) * microbatch
        expected = [row for row in range(start, start + microbatch) if row < global_batch]
        assert list(batch.rows(replica, index)) == expected


def test_uneven_last_batch():
    """Field report P03: a batch of 8 in microbatches of 3 is exact, the last row missing."""
    batch = BatchPlan(8, 1, 3)
    assert [list(batch.rows(0, index)) for index in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert batch.num_microbatches == 3 and batch.num_padding == 1
    batch = BatchPlan(5, 2, 2)
    assert [list(batch.rows(1, index)) for index in range(2)] == [[2, 3], []]
    assert batch.num_padding == 3


def test_sizes_below_one_and_rows_outside_are_refused():
    for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, True), (2.0, 1, 1)):
        with pytest.raises(PlanError, match="a whole number of at least 1 is needed"):
            BatchPlan(*sizes)
    for replica, index in ((2, 0), (0, 2), (-1, 0), (0, -1)):
        with pytest.raises(IndexError, match=f"microbatch {index} of replica {replica}"):
            BatchPlan(8, 2, 2).rows(replica, index)
