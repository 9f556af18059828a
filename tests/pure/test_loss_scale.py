"""The loss scale: halved, doubled, at its floor; what it counts."""

import pytest

from rankmesh.errors import StepError
from rankmesh.optim.scaler import LossScale


def test_halved_at_once_and_doubled_after_a_window():
    scale = LossScale(1024.0, window=3)
    seen = []
    for finite in (True, True, False, True, True, True, True):
        scale.update(finite)
        seen.append(scale.value)
    assert seen == [1024, 1024, 512, 512, 512, 1024, 1024]
    assert scale.state == (1024.0, 1, 1)


def test_it_has_a_ceiling():
    scale = LossScale(2.0**24, window=1)
    scale.update(True)
    assert scale.value == 2.0**24


def test_the_floor_ends_the_run():
    scale = LossScale(2.0, window=3)
    scale.update(False)
    with pytest.raises(StepError, match="loss scale 1, the least there is; 2 steps were skipped"):
        scale.update(False)


def test_state_round_trip():
    one, other = LossScale(8.0, 5, 2, 1), LossScale(1.0, 5)
    other.restore(one.state)
    assert other == one
