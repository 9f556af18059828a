"""What a training run comes to, for whoever called it from Python. It must not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A finished run, equal on every rank.

    losses: of each step that this call trained, from `first_step` on: nats a token, the mean over
    the global batch, before that step's update. eval_losses: step -> validation loss, where one was
    due. test_loss: None without data.test. run_dir, checkpoint: the run's folder and its newest
    checkpoint.
    """

    losses: tuple[float, ...]
    eval_losses: Mapping[int, float]
    test_loss: float | None
    first_step: int
    run_dir: Path
    checkpoint: Path

    @property
    def loss(self) -> float | None:
        """The last step's loss; None where no step was left to train."""
        return self.losses[-1] if self.losses else None
