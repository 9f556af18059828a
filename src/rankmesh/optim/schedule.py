"""Learning-rate schedules: pure functions of the step.

Owns the shapes and their one rule about steps. It knows no optimizer, no state and no torch.

The rule: steps count from 1, and `at(step)` is the rate of that step's update. Step i of w warm-up
steps has lr * i / w, so step w has lr in full and step 1 never has 0. The decay runs over the steps
w + 1 .. d (d = decay_steps) and starts at lr: step i has gone (i - 1 - w) / (d - w) of the way, so
that no step up to d is wasted on the end value. Steps after d have min_lr.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Shape = Callable[["LrSchedule", int], float]


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """A learning rate for every step from 1 on; equal by value.

    kind: a key of SHAPES. lr: the peak. min_lr: where decaying shapes end ("constant" ignores it,
    and "inverse_sqrt" never falls below it). warmup_steps, decay_steps: w and d of the rule above.
    wsd_decay_steps: the last steps up to d in which "wsd" falls; None for a tenth of d. The shapes
    are those of the config's `optimizer.schedule`, whose checks come first.
    """

    kind: str
    lr: float
    min_lr: float = 0.0
    warmup_steps: int = 0
    decay_steps: int = 0
    wsd_decay_steps: int | None = None

    def at(self, step: int) -> float:
        """The rate of update number `step`, which counts from 1. Raises ValueError below that."""
        if step < 1:
            raise ValueError(f"steps count from 1, got {step}")
        if step <= self.warmup_steps:
            return self.lr * (step / self.warmup_steps)
        return SHAPES[self.kind](self, step)

    def _between(self, share: float) -> float:
        """`share` of the way down from min_lr (0) to lr (1)."""
        return self.min_lr + (self.lr - self.min_lr) * share

    def _progress(self, step: int, start: int) -> float:
        """How far the decay of steps start + 1 .. decay_steps has gone, 0 at its first step."""
        if step > self.decay_steps:
            return 1.0
        return max(0, step - 1 - start) / max(1, self.decay_steps - start)


def _constant(schedule: LrSchedule, step: int) -> float:
    return schedule.lr


def _linear(schedule: LrSchedule, step: int) -> float:
    return schedule._between(1.0 - schedule._progress(step, schedule.warmup_steps))


def _cosine(schedule: LrSchedule, step: int) -> float:
    progress = schedule._progress(step, schedule.warmup_steps)
    return schedule._between((1.0 + math.cos(math.pi * progress)) / 2)


def _wsd(schedule: LrSchedule, step: int) -> float:
    """Warm-up, stable, decay (arXiv:2404.06395, section 4); the decay is linear."""
    given = schedule.wsd_decay_steps
    length = math.ceil(schedule.decay_steps / 10) if given is None else given
    start = max(schedule.warmup_steps, schedule.decay_steps - length)
    return schedule._between(1.0 - schedule._progress(step, start))


def _inverse_sqrt(schedule: LrSchedule, step: int) -> float:
    """Falls with the root of the step (arXiv:1706.03762, equation 3), scaled to lr at step w."""
    return max(schedule.min_lr, schedule.lr * math.sqrt(max(schedule.warmup_steps, 1) / step))


SHAPES: Mapping[str, Shape] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
}
