"""Microbatches of a step for one replica: which samples, as tokens and labels.

Owns the shift from tokens to labels and the padding rows. It must not know process groups,
devices or models. There is no prefetching yet: a sample is a copy of a few kilobytes out of a
memory map.

Letters: B samples of a microbatch, T = seq_len, G global batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rankmesh.data.blend import evaluation_order
from rankmesh.data.order import Order
from rankmesh.data.samples import Samples
from rankmesh.topology.batch import BatchPlan

IGNORED = -100
PADDING_SAMPLE = -1


@dataclass(frozen=True)
class Microbatch:
    """Rows of one microbatch, int64 on the CPU.

    tokens, labels [B, T]: labels[b, t] is the token after tokens[b, t]; models must not shift
    again. samples [B]: global sample numbers k, counted since the start of training (which key
    dropout). A padding row has tokens 0, every label IGNORED and sample PADDING_SAMPLE: B is the
    same everywhere.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    samples: torch.Tensor


class Loader:
    """Cuts the sequence of samples into steps of G, and a step into a replica's microbatches.

    It keeps no position: any step may be asked for, in any order, and gives the same rows each
    time. Sample numbers from `end` on are padding rows (None: never; a training order has no
    end).
    """

    def __init__(
        self,
        samples: Samples,
        order: Order,
        batch: BatchPlan,
        replica: int,
        end: int | None = None,
    ) -> None:
        self.samples = samples
        self.order = order
        self.batch = batch
        self.replica = replica
        self.end = end

    def step(self, step: int) -> list[Microbatch]:
        """The microbatches of step `step`, counted from 0: sample numbers from step * G on."""
        return self.at(step * self.batch.global_batch)

    def at(self, consumed: int) -> list[Microbatch]:
        """The microbatches of the step that follows `consumed` samples."""
        return [self._microbatch(consumed, j) for j in range(self.batch.num_microbatches)]

    @property
    def num_steps(self) -> int:
        """Steps up to `end`; ValueError where there is none."""
        if self.end is None:
            raise ValueError("a loader without an end has no number of steps")
        return -(-self.end // self.batch.global_batch)

    def _microbatch(self, consumed: int, j: int) -> Microbatch:
        size, length = self.batch.microbatch, self.samples.seq_len
        tokens = np.zeros((size, length), dtype=np.int64)
        labels = np.full((size, length), IGNORED, dtype=np.int64)
        numbers = np.full(size, PADDING_SAMPLE, dtype=np.int64)
        for row, batch_row in enumerate(self.batch.rows(self.replica, j)):
            number = consumed + batch_row
            if self.end is not None and number >= self.end:
                break
            sample = self.samples.sample(self.order.index(number))
            tokens[row], labels[row], numbers[row] = sample[:-1], sample[1:], number
        return Microbatch(
            torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(numbers)
        )


def eval_loader(
    samples: Samples, batch: BatchPlan, replica: int, num_samples: int | None = None
) -> Loader:
    """Samples in file order, each once: every evaluation sees the same ones.

    Files with weights are mixed by them, up to where the first one ends. `num_samples` takes only
    the first ones (None: all). The last of `num_steps` steps is filled up with padding rows.
    """
    order = evaluation_order(samples)
    end = order.num_samples if num_samples is None else min(num_samples, order.num_samples)
    return Loader(samples, order, batch, replica, end)
