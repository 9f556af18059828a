"""Runs a schedule's actions on a chunk.

Owns the order of forward and backward and what is kept between them. It decides nothing: the
schedule does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankmesh.nn import Layout, LossOptions
from rankmesh.parallel.apply import Chunk
from rankmesh.schedule.actions import Action


@dataclass(frozen=True)
class StageInput:
    """One microbatch on the device: tokens [N], labels [N] (IGNORED where no target), and its
    layout.
    """

    tokens: Tensor
    labels: Tensor
    layout: Layout


def execute(
    actions: Sequence[Action],
    chunk: Chunk,
    inputs: Sequence[StageInput],
    options: LossOptions,
    *,
    reduce: bool = True,
) -> Tensor:
    """Run all F and B of one step; returns the sum of token losses of this replica (fp64, one
    element).

    Main gradients of the sum accumulate in the chunk's buffers; each bucket's reduction starts in
    the last backward, unless `reduce` is off. Call `buffers.begin_step()` before and
    `buffers.finish()` after. Raises ValueError where the schedule is made for another number of
    microbatches.
    """
    backwards = [action for action in actions if action.kind == "B"]
    if len(inputs) != len(backwards):
        raise ValueError(f"{len(inputs)} microbatches for a schedule of {len(backwards)}")
    total = torch.zeros(1, dtype=torch.float64, device=chunk.buffers.mesh.device)
    live: dict[int, Tensor] = {}
    for action in actions:
        if action.kind == "F":
            loss = forward(chunk, inputs[action.microbatch], options)
            total += loss.detach()
            live[action.microbatch] = loss
        elif action.kind == "B":
            if reduce and action is backwards[-1]:
                chunk.buffers.arm()
            live.pop(action.microbatch).backward()
    return total


def forward(chunk: Chunk, batch: StageInput, options: LossOptions) -> Tensor:
    """Sum of token losses of one microbatch."""
    hidden, _ = chunk.model(batch.tokens, batch.layout)
    return chunk.model.loss(hidden, batch.labels, options)
