"""The vocabulary of schedules: an action, what it costs, and the actions of every pipeline rank.

Owns the words; it knows no order of actions and nothing that carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rankmesh.errors import PlanError


class Kind(StrEnum):
    """What is done. Communication actions name the stage on whose rank they stand."""

    F = "F"  # forward
    B = "B"  # full backward: I and W in one
    I = "I"  # noqa: E741 - backward for the input's gradient alone
    W = "W"  # backward for the weights' gradients alone
    SEND_F = "SEND_F"  # the output of F to the next stage
    RECV_F = "RECV_F"  # the input of F from the previous stage
    SEND_B = "SEND_B"  # the input's gradient to the previous stage
    RECV_B = "RECV_B"  # the output's gradient from the next stage

    # Enum's own is slow, and schedules are looked up by the ten thousand.
    __hash__ = str.__hash__


COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a pipeline rank does: `kind` of `microbatch` on `stage`, both from 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


# For each pipeline rank its actions in order.
Schedule = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """Time that F, I and W of one stage take, and a transfer between ranks; B takes i + w.

    Any unit, the same for all four. Raises PlanError unless f, i and w lie between 1e-100 and 1e100
    and send between 0 and 1e100: what is computed from them stays finite.
    """

    f: float = 1.0
    i: float = 1.0
    w: float = 1.0
    send: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("f", 1e-100), ("i", 1e-100), ("w", 1e-100), ("send", 0.0)):
            value = getattr(self, name)
            if not least <= value <= 1e100:
                raise PlanError(f"cost {name} {value}: a number from {least:g} to 1e100 is needed")

    def of(self, kind: Kind) -> float:
        """Time of one action; 0 for communication, which occupies no rank."""
        times = {Kind.F: self.f, Kind.B: self.i + self.w, Kind.I: self.i, Kind.W: self.w}
        return times.get(kind, 0.0)


UNIT_COSTS = Costs()
