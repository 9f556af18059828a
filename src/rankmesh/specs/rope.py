"""Scalings of rotary frequencies, one frozen value a kind.

Owns their fields, defaults and checks. The arithmetic is nn's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from rankmesh.errors import ConfigError
from rankmesh.specs.checks import check_number, check_size, nearest


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by `factor`: positions are squeezed into the first context."""

    kind: Literal["linear"] = "linear"
    factor: float

    def __post_init__(self) -> None:
        _check_above_zero(self, "factor")


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's: low frequencies divided by `factor`, high ones kept, a ramp between.

    original_max_seq_len: the context in tokens that the model was first trained with.
    """

    kind: Literal["llama3"] = "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        _check_above_zero(self, "factor", "low_freq_factor", "high_freq_factor")
        check_size("rope_scaling.original_max_seq_len", self.original_max_seq_len)
        _check_order(self, "low_freq_factor", "high_freq_factor")


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN's (Peng et al. 2023, arXiv:2309.00071): the same idea, with the ramp laid over the
    frequencies that turn `beta_slow` to `beta_fast` times within `original_max_seq_len`.

    attention_factor: what cosines and sines are multiplied with; 0 stands for 0.1 ln(factor) + 1.
    """

    kind: Literal["yarn"] = "yarn"
    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0

    def __post_init__(self) -> None:
        _check_above_zero(self, "factor", "beta_fast", "beta_slow")
        check_size("rope_scaling.original_max_seq_len", self.original_max_seq_len)
        _check_order(self, "beta_slow", "beta_fast")
        check_number("rope_scaling.attention_factor", self.attention_factor, low=0.0)

    @property
    def gain(self) -> float:
        """The attention factor, worked out where it is 0 (equation 22)."""
        return self.attention_factor or 0.1 * math.log(max(self.factor, 1.0)) + 1.0


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling
_KINDS: Mapping[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}
ROPE_KINDS = tuple(_KINDS)


def make_scaling(given: Mapping[str, Any]) -> RopeScaling:
    """The scaling of a table of fields; `kind` defaults to llama3. Raises ConfigError in one
    line.
    """
    kind = given.get("kind", "llama3")
    if kind not in ROPE_KINDS:
        raise ConfigError(f"model.rope_scaling.kind is {kind!r}; allowed: {', '.join(ROPE_KINDS)}")
    known = {field.name: field for field in fields(_KINDS[kind])}
    for name in given:
        if name not in known:
            raise ConfigError(
                f"model.rope_scaling.{name} is not a field of kind {kind}{nearest(name, known)}"
            )
    for name, field in known.items():
        if name not in given and field.default is MISSING:
            raise ConfigError(f"model.rope_scaling.{name} is missing; kind {kind} needs it")
    return _KINDS[kind](**given)


def _check_above_zero(scaling: object, *names: str) -> None:
    for name in names:
        check_number(f"rope_scaling.{name}", getattr(scaling, name), low=0.0, open_low=True)


def _check_order(scaling: object, low: str, high: str) -> None:
    if not getattr(scaling, low) < getattr(scaling, high):
        raise ConfigError(
            f"model.rope_scaling: {low} {getattr(scaling, low)} must be below "
            f"{high} {getattr(scaling, high)}"
        )
