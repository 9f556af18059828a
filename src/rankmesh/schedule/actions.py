"""The vocabulary of schedules: an action, and a tuple of them for each pipeline rank.

Owns the words; it knows no order of actions and nothing that carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
