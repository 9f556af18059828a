"""The decoder-only transformer and its block, for one device.

Owns the residual stream. A pipeline stage is the same class with parts absent; the names of layers
are their numbers in the whole model. Which operations stand behind `parts` it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from rankmesh.nn.attention import Attention
from rankmesh.nn.dropout import dropout
from rankmesh.nn.layers import Embedding, LayerNorm, Linear, RMSNorm, RMSNorm1p
from rankmesh.nn.layout import Layout
from rankmesh.nn.loss import LossOptions
from rankmesh.nn.mlp import MLP
from rankmesh.nn.parts import Piece
from rankmesh.nn.rotary import Phases, Rotary
from rankmesh.nn.softcap import soft_cap

Norm = RMSNorm | RMSNorm1p | LayerNorm
_EMBEDDING_SITE, _ATTENTION_SITE, _MLP_SITE = 0, 1, 3


def _residual_dropout(x: Tensor, layout: Layout, layer: int, site: int, rate: float) -> Tensor:
    if layout.dropout is None or rate == 0.0:
        return x
    hidden = x.shape[-1]
    index = (layout.stream_index.unsqueeze(1) * hidden, torch.arange(hidden, device=x.device))
    return dropout(x, layout.stream_key, layer, site, index, rate)


class Block(Piece):
    """Attention, then feed-forward, each added to the stream. Returns (x, aux).

    Each branch has a norm before it, after it, or both; an absent one is an Identity. Layers that
    share a Rotary share its phases.
    """

    def __init__(
        self,
        *,
        number: int,
        rotary: Rotary | None,
        attn_norm: Norm | nn.Identity,
        attn: Attention,
        attn_post_norm: Norm | nn.Identity,
        mlp_norm: Norm | nn.Identity,
        mlp: MLP,
        mlp_post_norm: Norm | nn.Identity,
        dropout: float,
    ) -> None:
        super().__init__()
        self.number = number
        self.rotary = rotary
        self.dropout = dropout
        self.attn_norm = attn_norm
        self.attn = attn
        self.attn_post_norm = attn_post_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_post_norm = mlp_post_norm

    def forward(
        self, x: Tensor, phases: Phases | None, layout: Layout
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        result: tuple[Tensor, tuple[Tensor, ...]] = self.parts.run(
            "block", self._branches, x, phases, layout
        )
        return result

    def _branches(
        self, x: Tensor, phases: Phases | None, layout: Layout
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        run = self.parts.run
        y = run("attention", self.attn, run("norm", self.attn_norm, x), phases, layout)
        y = self.attn_post_norm(y)
        x = x + _residual_dropout(y, layout, self.number, _ATTENTION_SITE, self.dropout)
        y = self.mlp_post_norm(run("mlp", self.mlp, run("norm", self.mlp_norm, x)))
        return x + _residual_dropout(y, layout, self.number, _MLP_SITE, self.dropout), ()


class Transformer(Piece):
    """Tokens [N] (or the previous stage's [N, H]) -> hidden [N, H]; absent parts belong to other
    stages.

    With `head` None and `tied` True the output projection is the embedding table; a last stage that
    holds the table for that alone has `enters` False. Embeddings are multiplied with `embed_scale`,
    logits capped softly at `logit_softcap` (0 = not).
    """

    def __init__(
        self,
        *,
        layers: Mapping[int, Block],
        embed: Embedding | None,
        positions: Embedding | None,
        norm: Norm | None,
        head: Linear | None,
        tied: bool,
        dropout: float,
        enters: bool = True,
        embed_scale: float = 1.0,
        logit_softcap: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed = embed
        self.positions = positions
        self.layers = nn.ModuleDict({str(number): block for number, block in layers.items()})
        self.norm = norm
        self.head = head
        self.tied = tied
        self.enters = enters
        self.dropout = dropout
        self.embed_scale = embed_scale
        self.logit_softcap = logit_softcap

    def blocks(self) -> Iterator[Block]:
        """The layers that are here, in order."""
        for block in self.layers.values():
            assert isinstance(block, Block)
            yield block

    @property
    def head_weight(self) -> Tensor:
        """[V, H]: the output projection, or the embedding table where they are tied."""
        holder = self.embed if self.tied else self.head
        if holder is None:
            raise RuntimeError("this stage holds no head")
        return holder.weight

    def forward(self, x: Tensor, layout: Layout) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.enters:
            x = self._embedded(x, layout)
        phases = {
            rotary: rotary.phases(layout, x.dtype) if rotary is not None else None
            for rotary in {block.rotary for block in self.blocks()}
        }
        aux: tuple[Tensor, ...] = ()
        for block in self.blocks():
            x, terms = block(x, phases[block.rotary], layout)
            aux += terms
        if self.norm is not None:
            x = self.norm(self.parts.leave(x))
        return x, aux

    def _embedded(self, tokens: Tensor, layout: Layout) -> Tensor:
        assert self.embed is not None
        x = self.parts.lookup(tokens, self.embed.weight)
        if self.embed_scale != 1.0:
            # Rounded to the model's dtype first, as the published 16-bit models had it.
            x = x * torch.full((), self.embed_scale, dtype=x.dtype, device=x.device)
        if self.positions is not None:
            x = x + self.parts.position_lookup(layout.stream_positions, self.positions.weight)
        x = self.parts.enter(x)
        return _residual_dropout(x, layout, 0, _EMBEDDING_SITE, self.dropout)

    def loss(self, hidden: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
        """Sum of token losses of the last stage's hidden [N, H] against labels [N]."""
        options = replace(options, softcap=self.logit_softcap)
        return self.parts.head_loss(hidden, self.head_weight, labels, options)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V]."""
        logits = self.parts.logits(hidden, self.head_weight)
        return soft_cap(logits, self.logit_softcap) if self.logit_softcap else logits
