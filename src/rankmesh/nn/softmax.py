"""The attention core: q, k, v of whole samples to the weighted sum of values.

Owns the fused and the explicit path. It knows neither projections nor how heads were split: head
counts are read as -1, and the first head's global number (dropout is keyed by it) comes with the
options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from rankmesh.nn.dropout import dropout

if TYPE_CHECKING:
    from rankmesh.nn.layout import Layout


@dataclass(frozen=True)
class AttentionOptions:
    """Constants of one layer's attention. `site` numbers its dropout; `first_head` its first query
    head.
    """

    layer: int
    scale: float
    dropout: float = 0.0
    site: int = 2
    first_head: int = 0


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: AttentionOptions
) -> Tensor:
    """Causal softmax(q k^T * scale) v; q [N, h, D], k and v [N, g, D] with h a multiple of g -> [N,
    h * D].
    """
    q4, k4, v4 = (_by_head(x, layout) for x in (q, k, v))
    if options.dropout and layout.dropout is not None:
        out = _explicit(q4, k4, v4, layout, options)
    else:
        if q.is_cuda:
            # Fused kernels for fp32 take no grouped heads there; the unfused one holds [h, T, T].
            k4, v4 = _repeated(k4, v4, q4.shape[1])
        out = F.scaled_dot_product_attention(
            q4, k4, v4, is_causal=True, scale=options.scale, enable_gqa=not q.is_cuda
        )
    return out.transpose(1, 2).reshape(len(q), -1)


def _by_head(x: Tensor, layout: Layout) -> Tensor:
    """[N, h, D] -> [B, h, T, D].

    On the CPU in memory head after head, which `rotate` has done already: the kernel walks along
    the rows of a head, and rows that lie a whole token apart crowd the same few sets of the cache.
    """
    heads = x.transpose(0, 1)
    if not x.is_cuda:
        heads = heads.contiguous()
    rows: Tensor = heads.unflatten(1, (layout.batch, layout.length))
    return rows.transpose(0, 1)


def _explicit(q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: AttentionOptions) -> Tensor:
    """The path with dropout on the probabilities [B, h, T, T]; softmax in fp32 or wider."""
    heads, length = q.shape[1], layout.length
    k, v = _repeated(k, v, heads)
    place = layout.index.view(layout.batch, length)
    future = place.unsqueeze(1) > place.unsqueeze(2)
    scores = (q @ k.transpose(-1, -2)) * options.scale
    scores = scores.masked_fill(future.unsqueeze(1), float("-inf"))
    probs = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(
        q.dtype
    )
    head = torch.arange(options.first_head, options.first_head + heads, device=q.device)
    row = head.view(1, -1, 1, 1) * length + place.view(layout.batch, 1, length, 1)
    index = row * length + place.view(layout.batch, 1, 1, length)
    return dropout(probs, layout.dropout, options.layer, options.site, index, options.dropout) @ v


def _repeated(k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """k and v [B, g, T, D] with every head as often as query heads share it: [B, heads, T, D]."""
    groups = heads // k.shape[1]
    if groups == 1:
        return k, v
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
