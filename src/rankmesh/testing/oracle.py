"""The oracle: what one process computes, written the plain way.

A plain loop over whole batches with torch.optim and torch's clipping. It imports nn and torch only,
so that it cannot share a mistake with the mesh, the buffers, the seam or the optimizers of this
package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankmesh.nn import IGNORED, DropoutKey, Layout, LossOptions, Transformer


@dataclass(frozen=True)
class WholeBatch:
    """One global batch: tokens and labels [B, T], global sample numbers [B]."""

    tokens: Tensor
    labels: Tensor
    samples: Tensor


@dataclass(frozen=True)
class Recipe:
    """The optimizer of the oracle's loop; `lrs` has one entry a step.

    decayed: names that decay; None for matrices but embeddings.
    """

    name: str
    lrs: Sequence[float]
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    clip_grad: float = 0.0
    seed: int = 0
    loss: LossOptions = field(default_factory=LossOptions)
    decayed: frozenset[str] | None = None


@dataclass
class Trace:
    """What a loop produced: losses and norms of each step, gradients of the first, weights after
    the last.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def _decays(name: str, parameter: Tensor, recipe: Recipe) -> bool:
    if recipe.decayed is not None:
        return name in recipe.decayed
    return parameter.dim() > 1 and not name.startswith(("embed.", "positions."))


def _optimizer(model: Transformer, recipe: Recipe) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    groups = [
        {
            "params": [p for n, p in named if _decays(n, p, recipe)],
            "weight_decay": recipe.weight_decay,
        },
        {"params": [p for n, p in named if not _decays(n, p, recipe)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if recipe.name == "sgd":
        return torch.optim.SGD(groups, lr=1.0, momentum=recipe.momentum)
    return torch.optim.AdamW(groups, lr=1.0, betas=recipe.betas, eps=recipe.eps, foreach=False)


def run_oracle(model: Transformer, batches: Sequence[WholeBatch], recipe: Recipe) -> Trace:
    """Train `model` (whole, with values) for one step a batch and return what happened.

    The loss is the mean over valid labels; a batch without any is skipped.
    """
    trace = Trace()
    optimizer = _optimizer(model, recipe)
    parameters = dict(model.named_parameters())
    for number, (batch, lr) in enumerate(zip(batches, recipe.lrs, strict=True), start=1):
        optimizer.zero_grad()
        valid = int((batch.labels != IGNORED).sum())
        if valid == 0:
            trace.losses.append(0.0)
            trace.norms.append(0.0)
            continue
        rows, length = batch.tokens.shape
        layout = Layout.plain(rows, length, dropout=DropoutKey(recipe.seed, number, batch.samples))
        hidden, _ = model(batch.tokens.flatten(), layout)
        loss = model.loss(hidden, batch.labels.flatten(), recipe.loss) / valid
        loss.backward()
        if number == 1:
            trace.grads = {
                name: p.grad.clone() for name, p in parameters.items() if p.grad is not None
            }
        limit = recipe.clip_grad or float("inf")
        trace.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        trace.losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    trace.weights = {name: p.detach().clone() for name, p in parameters.items()}
    return trace


def load_values(model: Transformer, values: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into the model by name; both sides must name the same parameters."""
    parameters = dict(model.named_parameters())
    if set(parameters) != set(values):
        raise KeyError(f"names differ: {sorted(set(parameters) ^ set(values))}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
