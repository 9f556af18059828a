"""Optimizers over segments: AdamW and SGD.

Owns the moments and the step count. The arithmetic is torch's own, in its fused form; gradients
arrive already scaled and clipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from rankmesh.optim.segment import Segment


class Optimizer(Protocol):
    """What the step calls; `state` names every tensor that a resume needs."""

    def step(self, lr: float) -> None: ...

    def state(self) -> Mapping[str, Tensor]: ...


def _groups(segments: Sequence[Segment], weight_decay: float) -> Iterator[tuple[float, list[int]]]:
    """(weight decay, indices of the segments it applies to), empty groups left out."""
    for decay in (True, False):
        indices = [i for i, segment in enumerate(segments) if segment.decay is decay]
        if indices:
            yield weight_decay if decay else 0.0, indices


class AdamW:
    """Loshchilov and Hutter 2017 (arXiv:1711.05101), bias-corrected, decay decoupled and scaled by
    lr.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self._segments = tuple(segments)
        self._betas, self._eps = betas, eps
        self._groups = tuple(_groups(segments, weight_decay))
        self._m = [torch.zeros_like(segment.param) for segment in segments]
        self._v = [torch.zeros_like(segment.param) for segment in segments]
        self._steps = [torch.zeros((), device=segment.param.device) for segment in segments]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of every segment in place."""
        for decay, indices in self._groups:
            adamw(
                [self._segments[i].param for i in indices],
                [self._segments[i].grad for i in indices],
                [self._m[i] for i in indices],
                [self._v[i] for i in indices],
                [],
                [self._steps[i] for i in indices],
                fused=True,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=lr,
                weight_decay=decay,
                eps=self._eps,
                maximize=False,
            )

    def state(self) -> Mapping[str, Tensor]:
        """`<name>.m`, `<name>.v` (like the segment) and `<name>.step` (scalar)."""
        named: dict[str, Tensor] = {}
        for segment, m, v, count in zip(self._segments, self._m, self._v, self._steps, strict=True):
            named |= {f"{segment.name}.m": m, f"{segment.name}.v": v, f"{segment.name}.step": count}
        return named


class SGD:
    """u = momentum * u + g + decay * p; p -= lr * u (without momentum u is g + decay * p), as
    torch.optim.SGD.
    """

    def __init__(
        self, segments: Sequence[Segment], *, momentum: float, weight_decay: float
    ) -> None:
        self._segments = tuple(segments)
        self._momentum = momentum
        self._groups = tuple(_groups(segments, weight_decay))
        self._u = [torch.zeros_like(segment.param) for segment in segments] if momentum else []

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of every segment in place."""
        for decay, indices in self._groups:
            sgd(
                [self._segments[i].param for i in indices],
                [self._segments[i].grad for i in indices],
                [self._u[i] if self._u else None for i in indices],
                fused=True,
                weight_decay=decay,
                momentum=self._momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )

    def state(self) -> Mapping[str, Tensor]:
        """`<name>.u`, where momentum is on."""
        return {f"{segment.name}.u": u for segment, u in zip(self._segments, self._u, strict=False)}
