"""Multi-head attention with grouped keys and values.

Owns the four projections and the order of operations; the projections' products and the core are
parts.
"""

from __future__ import annotations

from torch import Tensor

from rankmesh.nn.layers import Linear
from rankmesh.nn.layout import Layout
from rankmesh.nn.parts import Piece
from rankmesh.nn.qk_norm import HeadNorms, ProjectionNorms
from rankmesh.nn.rotary import Phases, rotate
from rankmesh.nn.softmax import AttentionOptions


class Attention(Piece):
    """x [N, H] -> [N, H]. Sizes of heads come from `head_dim`; their number is whatever the weights
    hold.
    """

    fused = (("q", "k", "v"),)

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm: HeadNorms | ProjectionNorms | None,
        options: AttentionOptions,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.options = options
        self.q = Linear(hidden_size, num_heads * head_dim, qkv_bias)
        self.k = Linear(hidden_size, num_kv_heads * head_dim, qkv_bias)
        self.v = Linear(hidden_size, num_kv_heads * head_dim, qkv_bias)
        self.qk_norm = qk_norm
        self.o = Linear(num_heads * head_dim, hidden_size, out_bias)

    def forward(self, x: Tensor, phases: Phases | None, layout: Layout) -> Tensor:
        outputs = self.parts.column(x, (self.q, self.k, self.v))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in outputs)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        if phases is not None:
            q, k = rotate(q, phases), rotate(k, phases)
        y = self.parts.run("core", self.parts.core, q, k, v, layout, self.options)
        return self.parts.row(y, self.o)
