"""The feed-forward part: a gated pair of projections (Shazeer 2020, arXiv:2002.05202) or GELU.

Owns its projections and activation; the products are parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from rankmesh.nn.layers import Linear
from rankmesh.nn.parts import Piece

Activation = Literal["swiglu", "geglu_tanh", "gelu", "gelu_tanh"]
_aten = torch.ops.aten

# What a gate goes through, and its gradient from (gradient of the result, gate).
_GATES: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "swiglu": (F.silu, _aten.silu_backward),
    "geglu_tanh": (
        partial(F.gelu, approximate="tanh"),
        partial(_aten.gelu_backward, approximate="tanh"),
    ),
}


class _Gated(torch.autograd.Function):
    """act(gate) * up, keeping only its two inputs: the activation is cheaper to redo than to
    store.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(gate, up)
        act, _ = _GATES[kind]
        return act(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        (grad,) = grads
        act, act_backward = _GATES[ctx.kind]
        return act_backward(grad * up, gate), act(gate).mul_(grad), None


def _gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    result: Tensor = _Gated.apply(gate, up, kind)
    return result


class MLP(Piece):
    """x [N, H] -> [N, H] through ffn_size features."""

    fused = (("gate", "up"),)

    def __init__(
        self, *, hidden_size: int, ffn_size: int, activation: Activation, bias: bool
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate = Linear(hidden_size, ffn_size, bias) if activation in _GATES else None
        self.up = Linear(hidden_size, ffn_size, bias)
        self.down = Linear(ffn_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            gate, up = self.parts.column(x, (self.gate, self.up))
            y = self.parts.run("activation", _gated, gate, up, self.activation)
        else:
            (up,) = self.parts.column(x, (self.up,))
            shape = "tanh" if self.activation == "gelu_tanh" else "none"
            y = self.parts.run("activation", partial(F.gelu, approximate=shape), up)
        return self.parts.row(y, self.down)
