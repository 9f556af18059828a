"""The vocabulary split over tp: embedding lookup, and cross entropy that never gathers logits.

Owns the two autograd Functions and the head's parts. Rows are split at the table's boundaries, so
any vocabulary size works without padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rankmesh.comm.seam import Group, Seam
from rankmesh.nn import IGNORED, LossOptions, soft_cap
from rankmesh.parallel.linear import Product, gathered, multiply, summed
from rankmesh.parallel.slots import Slot


@dataclass(frozen=True)
class Rows:
    """The rows [start, stop) of a table of `total` that this rank holds, and the group that holds
    the rest. sequence: what is looked up ends in slices of the sequence.
    """

    start: int
    stop: int
    total: int
    group: Group
    seam: Seam
    sequence: bool = False

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(row here or 0, whether it is here) for ids [N]."""
        here = (tokens >= self.start) & (tokens < self.stop)
        return torch.where(here, tokens - self.start, 0), here


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, slot: Slot, rows: Rows) -> Tensor:
        index, here = rows.local(tokens)
        ctx.slot, ctx.split, ctx.rows = slot, rows.group.size > 1, rows
        ctx.save_for_backward(index, here)
        out = F.embedding(index, table)
        if ctx.split:
            out = summed(out.masked_fill_(~here.unsqueeze(1), 0.0), rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        index, here = ctx.saved_tensors
        grad = grads[0]
        if ctx.rows.sequence:
            grad = gathered(grad, ctx.rows, "backward")
        if ctx.split:
            index, grad = index[here], grad[here]
        ctx.slot.add_rows(index, grad)
        return None, None, None, None


@dataclass(frozen=True)
class TableLookup:
    """The `lookup` parts: ids [N] -> [N, H]; 1 all-reduce forward over the rows' group, none
    backward. Under sequence parallelism -> [n, H]: 1 reduce-scatter and 1 all-gather.
    """

    slots: Mapping[Tensor, Slot]
    rows: Mapping[Tensor, Rows]

    def __call__(self, tokens: Tensor, table: Tensor) -> Tensor:
        result: Tensor = _Lookup.apply(tokens, table, self.slots[table], self.rows[table])
        return result


class _CrossEntropy(torch.autograd.Function):
    """Sum of token losses from logits [N, V_local]; one all-gather of [N, 2 or 3] merges the ranks'
    parts.

    With l = log sum exp and t the target's logit, a token costs l - (1 - s) t - s mean(logits) + z
    l^2, all of the logits behind their soft cap. Forward overwrites the logits with exp(logit -
    largest), which backward only has to scale: nothing else needs them, and without a cap no second
    [N, V_local] is made.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, rows: Rows, options: LossOptions
    ) -> Tensor:
        smoothing, z = options.label_smoothing, options.z_loss
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        slope = []
        if options.softcap:
            wide = soft_cap(wide, options.softcap)
            slope = [1.0 - (wide / options.softcap).square_()]
        valid = labels != IGNORED
        index, here = rows.local(torch.where(valid, labels, -1))
        target = wide.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill_(~here, 0.0)
        sums = [wide.sum(dim=1)] if smoothing else []
        top = wide.amax(dim=1)
        powers = wide.sub_(top.unsqueeze(1)).exp_()
        parts = [top + powers.sum(dim=1).log(), target, *sums]
        merged = _gather(torch.stack(parts, dim=1), rows)
        log_z, target = torch.logsumexp(merged[:, :, 0], dim=0), merged[:, :, 1].sum(dim=0)
        loss = log_z - (1.0 - smoothing) * target + z * log_z.square()
        if smoothing:
            loss = loss - smoothing / rows.total * merged[:, :, 2].sum(dim=0)
        ctx.rows, ctx.options, ctx.dtype = rows, options, logits.dtype
        ctx.save_for_backward(powers, top, log_z, valid, index, here, *slope)
        return torch.where(valid, loss, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        powers, top, log_z, valid, index, here, *slope = ctx.saved_tensors
        smoothing, z = ctx.options.label_smoothing, ctx.options.z_loss
        weight = torch.where(valid, grads[0], 0.0)
        scale = weight * (1.0 + 2.0 * z * log_z) * torch.exp(top - log_z)
        grad = powers.detach().mul_(scale.unsqueeze(1))
        if smoothing:
            grad.sub_((weight * (smoothing / ctx.rows.total)).unsqueeze(1))
        at_target = torch.where(here, (smoothing - 1.0) * weight, 0.0)
        grad.scatter_add_(1, index.unsqueeze(1), at_target.unsqueeze(1))
        if slope:
            grad.mul_(slope[0])
        return grad.to(ctx.dtype), None, None, None


def _gather(part: Tensor, rows: Rows) -> Tensor:
    """[N, k] of every rank as [P, N, k]."""
    out = part.new_empty((rows.group.size, *part.shape))
    rows.seam.all_gather(out, part, rows.group, "forward").wait()
    return out


@dataclass(frozen=True)
class VocabularyHead:
    """The `head_loss` and `logits` parts: a column product and the loss.

    Collectives of `loss`: one all-gather forward, one all-reduce backward (the column product's).
    """

    products: Mapping[Tensor, Product]
    rows: Mapping[Tensor, Rows]

    def loss(self, hidden: Tensor, weight: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
        """Sum of token losses; hidden [N, H], labels [N]."""
        (logits,) = multiply(hidden, weight, self.products[weight])
        return vocabulary_cross_entropy(logits, labels, self.rows[weight], options)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """This rank's columns [N, V_local]."""
        (logits,) = multiply(hidden, weight, self.products[weight])
        return logits


def vocabulary_cross_entropy(
    logits: Tensor, labels: Tensor, rows: Rows, options: LossOptions
) -> Tensor:
    """Sum of token losses; logits [N, V_local] are this rank's columns, labels [N] global ids or
    IGNORED.

    Raises ValueError where the logits' width is not the rank's share of the vocabulary: whole rows
    handed to the split loss would count every part twice.
    """
    if logits.shape[1] != rows.stop - rows.start:
        raise ValueError(
            f"logits have {logits.shape[1]} columns, this rank's share of {rows.total} is "
            f"[{rows.start}, {rows.stop})"
        )
    result: Tensor = _CrossEntropy.apply(logits, labels, rows, options)
    return result
