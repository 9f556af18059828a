"""The feed-forward part: SwiGLU (Shazeer 2020, arXiv:2002.05202) or GELU.

Owns its projections and activation; the products are parts.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from rankmesh.nn.layers import Linear
from rankmesh.nn.parts import Piece

Activation = Literal["swiglu", "gelu", "gelu_tanh"]


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, keeping only its two inputs: silu is cheaper to redo than to store."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        (grad,) = grads
        d_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return d_gate, F.silu(gate).mul_(grad)


class MLP(Piece):
    """x [N, H] -> [N, H] through ffn_size features."""

    fused = (("gate", "up"),)

    def __init__(
        self, *, hidden_size: int, ffn_size: int, activation: Activation, bias: bool
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate = Linear(hidden_size, ffn_size, bias) if activation == "swiglu" else None
        self.up = Linear(hidden_size, ffn_size, bias)
        self.down = Linear(ffn_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            gate, up = self.parts.column(x, (self.gate, self.up))
            y: Tensor = _SwiGLU.apply(gate, up)
        else:
            (up,) = self.parts.column(x, (self.up,))
            y = F.gelu(up, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        return self.parts.row(y, self.down)
