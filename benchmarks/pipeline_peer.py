"""The peer of the pipeline benchmark: the plain Llama under torch.distributed.pipelining.

Owns the cut of the plain model into stages and a trainer around torch's schedules, as a reader of
torch's documentation writes them. It must not know this package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional as F

from benchmarks.plain import Llama, Trainer

Layers = Sequence[range]


class Stage(nn.Module):
    """Some layers of a plain model, with the embedding in front or the head behind where the model
    begins or ends.
    """

    def __init__(self, model: Llama, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.embed = model.embed if first else None
        self.layers = nn.ModuleList(model.layers[number] for number in layers)
        self.norm = model.norm if last else None
        self.head = model.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        inverse = 10000.0 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.arange(length).unsqueeze(1) * inverse
        cos, sin = angles.cos(), angles.sin()
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def share_of_loss(logits: Tensor, labels: Tensor, *, targets: int) -> Tensor:
    """The microbatch's part of the mean over all targets of the batch."""
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / targets


class PipelineTrainer(Trainer):
    """The plain step on the stages of one rank: the schedule runs them, the norm is summed over
    the ranks.

    stages: stage number -> module, those of this rank.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        total: int,
        make: Callable[..., Any],
        microbatches: int,
        targets: int,
        lr: float,
    ) -> None:
        super().__init__(nn.ModuleList(stages.values()), lr)
        self.first, self.last = 0 in stages, total - 1 in stages
        wrapped = [
            pipelining.PipelineStage(stage, number, total, torch.device("cpu"))
            for number, stage in stages.items()
        ]
        # The loss is a part of the mean already: nothing is left to scale.
        self.schedule = make(
            wrapped if issubclass(make, pipelining.schedules.PipelineScheduleMulti) else wrapped[0],
            n_microbatches=microbatches,
            loss_fn=partial(share_of_loss, targets=targets),
            scale_grads=False,
        )

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        """One step on the whole batch [B, T], which the schedule cuts; returns the mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        self.schedule.step(
            *([tokens] if self.first else []),
            target=labels if self.last else None,
            losses=losses,
            return_outputs=False,
        )
        loss = torch.stack(losses).sum().detach() if self.last else torch.zeros(())
        self.clip(loss)
        self.optimizer.step()
        return loss.item()

    def clip(self, loss: Tensor) -> None:
        """One all-reduce carries the squared norm, and the loss for the log."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        both = torch.stack([nn.utils.get_total_norm(grads).square(), loss])
        dist.all_reduce(both)
        loss.copy_(both[1])
        nn.utils.clip_grads_with_norm_(self.model.parameters(), 1.0, both[0].sqrt())


SCHEDULES: dict[str, Any] = {
    name: getattr(pipelining, name)
    for name in ("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
}
# Not among the package's own names.
SCHEDULES["ScheduleZBVZeroBubble"] = pipelining.schedules.ScheduleZBVZeroBubble


def pipeline_trainer(
    model: Llama,
    layers: Layers,
    ranks: Sequence[int],
    name: str,
    microbatches: int,
    targets: int,
    lr: float,
) -> PipelineTrainer:
    """The trainer of this rank.

    layers: those of each stage. ranks: the rank of each stage. targets: of a whole batch.
    """
    end, rank = len(layers) - 1, dist.get_rank()
    stages = {
        number: Stage(model, held, first=number == 0, last=number == end)
        for number, held in enumerate(layers)
        if ranks[number] == rank
    }
    return PipelineTrainer(stages, len(layers), SCHEDULES[name], microbatches, targets, lr)
