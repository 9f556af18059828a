"""Owns the learning-rate schedules against closed forms. Imports no torch."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.config import OptimizerConfig
from rankmesh.config.explain import explain
from rankmesh.config.fields import OneOf
from rankmesh.optim.schedule import SHAPES, LrSchedule

KINDS = tuple(SHAPES)
DECAYING = ("linear", "cosine", "wsd")


def rates(steps: int, **given: object) -> list[float]:
    schedule = LrSchedule(**given)  # type: ignore[arg-type]
    return [schedule.at(step) for step in range(1, steps + 1)]


def test_linear_in_numbers() -> None:
    assert rates(7, kind="linear", lr=1.0, warmup_steps=2, decay_steps=6) == pytest.approx(
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    )


def test_cosine_in_numbers() -> None:
    found = rates(6, kind="cosine", lr=2.0, min_lr=1.0, warmup_steps=1, decay_steps=5)
    half = math.sqrt(0.5)
    assert found == pytest.approx([2.0, 2.0, 1.5 + half / 2, 1.5, 1.5 - half / 2, 1.0])


def test_wsd_in_numbers() -> None:
    found = rates(
        9, kind="wsd", lr=1.0, min_lr=0.2, warmup_steps=2, decay_steps=8, wsd_decay_steps=4
    )
    assert found == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    # A tenth of decay_steps where nothing is said.
    default = rates(100, kind="wsd", lr=1.0, decay_steps=100)
    assert default[:91] == [1.0] * 91
    assert default[91] == pytest.approx(0.9)


def test_inverse_sqrt_in_numbers() -> None:
    found = rates(16, kind="inverse_sqrt", lr=1.0, min_lr=0.6, warmup_steps=4, decay_steps=16)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[8] == pytest.approx(2 / 3)
    assert found[15] == 0.6


def test_constant_in_numbers() -> None:
    found = rates(4, kind="constant", lr=1.0, min_lr=0.5, warmup_steps=2, decay_steps=3)
    assert found == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [0, 1, 4, 10])
def test_first_step_moves_the_weights(kind: str, warmup: int) -> None:
    """Field report L08: warm-up 0, 1, 4 and = total raise nothing; step 1 never has lr 0."""
    found = rates(10, kind=kind, lr=3e-4, warmup_steps=warmup, decay_steps=10)
    assert found[0] == pytest.approx(3e-4 / max(warmup, 1))
    assert min(found) > 0
    if warmup:
        assert found[warmup - 1] == 3e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_decay_of_length_zero(kind: str, warmup: int) -> None:
    """Field report L08: with decay_steps = warm-up there is nothing to divide by."""
    given = {"lr": 1.0, "min_lr": 0.25, "warmup_steps": warmup, "decay_steps": warmup}
    found = rates(warmup + 3, kind=kind, **given, wsd_decay_steps=0)
    assert found[:warmup] == [i / warmup for i in range(1, warmup + 1)]
    if kind in DECAYING:
        assert found[warmup:] == [0.25] * 3


def test_wsd_without_decay_is_constant() -> None:
    found = rates(6, kind="wsd", lr=1.0, decay_steps=5, wsd_decay_steps=0)
    assert found == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="from 1, got 0"):
        LrSchedule(kind="constant", lr=1.0).at(0)


@given(
    kind=st.sampled_from(KINDS),
    warmup=st.integers(0, 50),
    decay=st.integers(0, 200),
    wsd=st.none() | st.integers(0, 60),
    floor=st.floats(0, 1),
)
def test_shape(kind: str, warmup: int, decay: int, wsd: int | None, floor: float) -> None:
    """Rates rise up to the end of warm-up, never after it, and stay in their bounds."""
    decay += warmup == 0 and decay == 0  # at least one step that is not past the end
    found = rates(
        warmup + decay + 5,
        kind=kind,
        lr=1.0,
        min_lr=floor,
        warmup_steps=warmup,
        decay_steps=warmup + decay,
        wsd_decay_steps=wsd,
    )
    rise, fall = found[:warmup], found[max(warmup - 1, 0) :]
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    assert 0 < found[0] <= 1
    assert all(rate >= floor - 1e-12 for rate in fall)
    if kind in DECAYING:
        assert found[warmup + decay :] == [floor] * 5
        assert all(rate > floor for rate in found[warmup : warmup + decay]) or floor > 0.9


@given(kind=st.sampled_from(KINDS), resume_at=st.integers(1, 20))
def test_rate_depends_on_the_step_alone(kind: str, resume_at: int) -> None:
    """Field report L02: a schedule made anew at any step goes on as if it had never stopped."""
    given = {"kind": kind, "lr": 1.0, "warmup_steps": 5, "decay_steps": 20}
    straight = rates(20, **given)
    resumed = [LrSchedule(**given).at(step) for step in range(resume_at, 21)]  # type: ignore[arg-type]
    assert straight[resume_at - 1 :] == resumed


def test_config_offers_every_shape() -> None:
    """The config may not import `optim`; here they are held together."""
    field = OptimizerConfig.__dataclass_fields__["schedule"]
    rule = field.metadata["rule"]
    assert isinstance(rule, OneOf)
    assert set(rule.choices) == set(SHAPES)
    assert OptimizerConfig().schedule in SHAPES
    assert explain("optimizer.schedule").default == '"cosine"'
