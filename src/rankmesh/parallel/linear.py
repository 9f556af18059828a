"""Linear layers under tensor parallelism: one autograd Function for column and row products.

Owns the products, their collectives and the hand-over of weight gradients to the buffers. In
backward the input gradient comes first, its all-reduce starts, and the weight gradient is
multiplied while it runs (Shoeybi et al. 2019, arXiv:1909.08053, section 3, f and g) or, where a
schedule splits backward, later (Qi et al. 2023, arXiv:2401.10241, section 2). Under sequence
parallelism the same sums end in slices (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rankmesh import nn
from rankmesh.comm.seam import Group, Handle, Seam
from rankmesh.parallel.later import Later
from rankmesh.parallel.slots import Slot


@dataclass(frozen=True)
class Product:
    """What one product needs beside its input: run-time matrix, bias, and the groups of its two
    sums.

    sizes: widths of the outputs. reduce_grad: group over which the input gradient is partial
    (column). reduce_out: group over which the output is partial (row); the bias is added after that
    sum, once. later: where weight gradients go.

    sequence: the input of a column and the output of a row are this rank's slice of the sequence: a
    column gathers its input, a row's sum is scattered, and backward the other way round. regather:
    a column keeps its slice alone and gathers it again for the weight gradient.
    """

    weight: Slot
    bias: Slot | None
    sizes: tuple[int, ...]
    seam: Seam
    later: Later
    reduce_grad: Group | None = None
    reduce_out: Group | None = None
    sequence: bool = False
    regather: bool = True

    @property
    def group(self) -> Group:
        """The group over which it sums."""
        group = self.reduce_grad if self.reduce_out is None else self.reduce_out
        assert group is not None
        return group

    @property
    def scatters_grad(self) -> bool:
        """A column whose input is a slice."""
        return self.sequence and self.reduce_grad is not None


class _Linear(torch.autograd.Function):
    """x [N, in] -> outputs [N, size_i]. `anchor` is a parameter: it makes the output require a
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, product: Product) -> tuple[Tensor, ...]:
        ctx.product = product
        whole = x
        if product.scatters_grad:
            whole = gathered(x, product, "forward")
        ctx.save_for_backward(x if product.regather else whole)
        bias = product.bias.weight if product.bias is not None else None
        if product.reduce_out is None:
            y = F.linear(whole, product.weight.weight, bias)
        else:
            y = summed(F.linear(whole, product.weight.weight), product)
            if bias is not None:
                y += bias
        return y.split(product.sizes, dim=-1) if len(product.sizes) > 1 else (y,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        product: Product = ctx.product
        (x,) = ctx.saved_tensors
        own = grads
        if product.sequence and product.reduce_out is not None:
            grads = (gathered(grads[0], product, "backward"),)
        grad_x, handle = None, None
        if ctx.needs_input_grad[0]:
            grad_x, handle = _summed_gradient(_input_gradient(grads, product), product)
        if ctx.needs_input_grad[1]:
            product.later.do(partial(_weight_gradient, grads, x, product))
            if product.bias is not None:
                wide = product.bias.grad.dtype
                product.bias.add(torch.cat([grad.sum(dim=0, dtype=wide) for grad in own]))
        if handle is not None:
            handle.wait()
        return grad_x, None, None


class Meeting(Protocol):
    """Where the tp ranks sum and gather; sequence: in slices of the sequence."""

    @property
    def group(self) -> Group: ...

    @property
    def seam(self) -> Seam: ...

    @property
    def sequence(self) -> bool: ...


def gathered(part: Tensor, at: Meeting, phase: str) -> Tensor:
    """[N, H] from every rank's slice [n, H]; 1 all-gather."""
    whole = part.new_empty((at.group.size * part.shape[0], part.shape[1]))
    at.seam.all_gather(whole, part.contiguous(), at.group, phase).wait()
    return whole


def summed(y: Tensor, at: Meeting) -> Tensor:
    """The sum of every rank's [N, H]: 1 all-reduce, or 1 reduce-scatter into slices [n, H]."""
    if not at.sequence:
        at.seam.all_reduce(y, at.group, "forward").wait()
        return y
    part = y.new_empty((y.shape[0] // at.group.size, y.shape[1]))
    at.seam.reduce_scatter(part, y, at.group, "forward").wait()
    return part


def _summed_gradient(grad_x: Tensor, product: Product) -> tuple[Tensor, Handle | None]:
    """A column's input gradient and its sum under way."""
    group = product.reduce_grad
    if group is None:
        return grad_x, None
    if not product.sequence:
        return grad_x, product.seam.all_reduce(grad_x, group, "backward")
    part = grad_x.new_empty((grad_x.shape[0] // group.size, grad_x.shape[1]))
    return part, product.seam.reduce_scatter(part, grad_x, group, "backward")


def _weight_gradient(grads: tuple[Tensor, ...], x: Tensor, product: Product) -> None:
    """Deposit it; a column that kept its slice alone gathers it first."""
    if product.scatters_grad and product.regather:
        x = gathered(x, product, "backward")
    product.weight.add_product(grads, x)


def _input_gradient(grads: tuple[Tensor, ...], product: Product) -> Tensor:
    """[N, in], summed over the outputs: joining their gradients for one product costs a copy."""
    first, *others = zip(grads, product.weight.weight.split(product.sizes), strict=True)
    grad_x: Tensor = first[0] @ first[1]
    for grad, weight in others:
        grad_x.addmm_(grad, weight)
    return grad_x


def multiply(x: Tensor, anchor: Tensor, product: Product) -> tuple[Tensor, ...]:
    """The outputs of `product` for x [N, in]; `anchor` is its first weight as the module has it."""
    outputs: tuple[Tensor, ...] = _Linear.apply(x, anchor, product)
    return outputs


@dataclass(frozen=True)
class ColumnProducts:
    """The `column` part: outputs split over tp, input gradient summed over tp; 1 all-reduce
    backward.
    """

    products: Mapping[Tensor, Product]

    def __call__(self, x: Tensor, linears: tuple[nn.Linear, ...]) -> tuple[Tensor, ...]:
        anchor = linears[0].weight
        return multiply(x, anchor, self.products[anchor])


@dataclass(frozen=True)
class RowProducts:
    """The `row` part: input split over tp, output summed over tp; 1 all-reduce forward."""

    products: Mapping[Tensor, Product]

    def __call__(self, x: Tensor, linear: nn.Linear) -> Tensor:
        (y,) = multiply(x, linear.weight, self.products[linear.weight])
        return y


class _Deposit(torch.autograd.Function):
    """A vector parameter entering the graph: its gradient goes to the buffers."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, slot: Slot) -> Tensor:
        ctx.slot = slot
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.slot.add(grads[0])
        return None, None


@dataclass(frozen=True)
class Deposits:
    """The `parameter` part: norm weights and biases."""

    slots: Mapping[Tensor, Slot]

    def __call__(self, parameter: Tensor) -> Tensor:
        result: Tensor = _Deposit.apply(parameter, self.slots[parameter])
        return result
