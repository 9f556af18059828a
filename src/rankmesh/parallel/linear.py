"""Linear layers under tensor parallelism: one autograd Function for column and row products.

Owns the products, their collectives and the hand-over of weight gradients to the buffers. In
backward the input gradient comes first, its all-reduce starts, and the weight gradient is
multiplied while it runs (Shoeybi et al. 2019, arXiv:1909.08053, section 3, f and g) or, where a
schedule splits backward, later (Qi et al. 2023, arXiv:2401.10241, section 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rankmesh import nn
from rankmesh.comm.seam import Group, Seam
from rankmesh.parallel.buffers import Slot
from rankmesh.parallel.later import Later


@dataclass(frozen=True)
class Product:
    """What one product needs beside its input: run-time matrix, bias, and the groups of its two
    sums.

    sizes: widths of the outputs. reduce_grad: group over which the input gradient is partial
    (column). reduce_out: group over which the output is partial (row); the bias is added after that
    sum, once. later: where weight gradients go.
    """

    weight: Slot
    bias: Slot | None
    sizes: tuple[int, ...]
    seam: Seam
    later: Later
    reduce_grad: Group | None = None
    reduce_out: Group | None = None


class _Linear(torch.autograd.Function):
    """x [N, in] -> outputs [N, size_i]. `anchor` is a parameter: it makes the output require a
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, product: Product) -> tuple[Tensor, ...]:
        ctx.product = product
        ctx.save_for_backward(x)
        bias = product.bias.weight if product.bias is not None else None
        if product.reduce_out is None:
            y = F.linear(x, product.weight.weight, bias)
        else:
            y = F.linear(x, product.weight.weight)
            product.seam.all_reduce(y, product.reduce_out, "forward").wait()
            if bias is not None:
                y += bias
        return y.split(product.sizes, dim=-1) if len(product.sizes) > 1 else (y,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        product: Product = ctx.product
        (x,) = ctx.saved_tensors
        grad_x, handle = None, None
        if ctx.needs_input_grad[0]:
            grad_x = _input_gradient(grads, product)
            if product.reduce_grad is not None:
                handle = product.seam.all_reduce(grad_x, product.reduce_grad, "backward")
        if ctx.needs_input_grad[1]:
            product.later.do(partial(product.weight.add_product, grads, x))
            if product.bias is not None:
                wide = product.bias.grad.dtype
                product.bias.add(torch.cat([grad.sum(dim=0, dtype=wide) for grad in grads]))
        if handle is not None:
            handle.wait()
        return grad_x, None, None


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
