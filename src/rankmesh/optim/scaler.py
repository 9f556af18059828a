"""The dynamic loss scale of 16-bit floats with a narrow range.

Owns its value and its counters. That all ranks see the same overflow is the verdict's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankmesh.errors import StepError

_CEILING = 2.0**24


@dataclass
class LossScale:
    """What the loss is multiplied by before backward (Micikevicius et al. 2017, arXiv:1710.03740,
    section 3.2).

    It is halved after a step whose gradient overflowed, which is skipped, and doubled after
    `window` steps in a row that did not. good: such steps since the last change. skipped: steps
    since the start of training, which do not count for the learning rate.
    """

    value: float
    window: int
    good: int = 0
    skipped: int = 0

    def update(self, finite: bool) -> None:
        """After a step. Raises StepError where nothing is left to halve."""
        if finite:
            self.good += 1
            if self.good >= self.window:
                self.value, self.good = min(2.0 * self.value, _CEILING), 0
            return
        self.skipped, self.good = self.skipped + 1, 0
        if self.value <= 1.0:
            raise StepError(
                f"the gradient overflows at loss scale {self.value:g}, the least there is; "
                f"{self.skipped} steps were skipped so far: a lower learning rate, or train.dtype "
                "bf16, may help"
            )
        self.value /= 2.0

    @property
    def state(self) -> tuple[float, int, int]:
        """(value, good, skipped): what a resume needs."""
        return self.value, self.good, self.skipped

    def restore(self, state: tuple[float, int, int]) -> None:
        """The inverse of `state`."""
        self.value, self.good, self.skipped = state
