"""Leaf modules that hold parameters: Linear, Embedding and the norms.

They own shapes and single-device arithmetic. How a parameter enters the graph, and what surrounds a
matrix product, is decided by the `Parts` of the module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankmesh.nn.parts import Piece


class Linear(nn.Module):
    """Holder of weight [out, in] and optional bias [out]; applied by a column or row operation of
    `Parts`.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None


class Embedding(nn.Module):
    """Holder of a table [rows, H]."""

    def __init__(self, rows: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden_size))


class _RMSNorm(torch.autograd.Function):
    """Keeps its input as it came and one number a row; torch's on the CPU keeps the normed rows
    too, and widened copies of both.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        product = grads[0] * normed
        grad_weight = product.flatten(0, -2).sum(dim=0).to(weight.dtype)
        mean = product.mul_(weight).mean(dim=-1, keepdim=True)
        grad = (grads[0].to(scale.dtype) * weight).sub_(normed.mul_(mean)).mul_(scale)
        return grad.to(x.dtype), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim, in fp32 or wider, rounded to x's dtype at the end."""
    if x.is_cuda:
        # One kernel, which keeps as little.
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
    result: Tensor = _RMSNorm.apply(x, weight, eps)
    return result


class RMSNorm(Piece):
    """x / rms(x) * weight, statistics in fp32 or wider (Zhang and Sennrich 2019, arXiv:1910.07467,
    eq. 4).
    """

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.parts.parameter(self.weight), self.eps)


class RMSNorm1p(Piece):
    """RMSNorm whose weights are stored less one, as Gemma's: a weight of 0 does nothing. In fp32 or
    wider throughout, since 1 + w loses most of w in 16 bits.
    """

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.parts.parameter(self.weight).to(wide) + 1.0
        return rms_norm(x, weight, self.eps)


class LayerNorm(Piece):
    """(x - mean) / std * weight + bias (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.parts.parameter(self.weight), self.parts.parameter(self.bias)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)
