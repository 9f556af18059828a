"""The attention core: q, k, v of whole samples to the weighted sum of values.

Owns the fused and the explicit path. It knows neither projections nor how heads were split: head
counts are read as -1, and the first head's global number (dropout is keyed by it) comes with the
options.

Letters: N tokens, B samples, T positions, h query heads, g key and value heads, D head dim, W
window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rankmesh.nn.dropout import dropout
from rankmesh.nn.softcap import soft_cap

if TYPE_CHECKING:
    from rankmesh.nn.layout import Layout

_aten = torch.ops.aten


@dataclass(frozen=True)
class AttentionOptions:
    """Constants of one layer's attention.

    window: positions that a token attends to, its own included; 0 = all before it. softcap: cap of
    the scores; 0 = none. site numbers its dropout, first_head is its first query head.
    """

    layer: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    dropout: float = 0.0
    site: int = 2
    first_head: int = 0


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: AttentionOptions
) -> Tensor:
    """Causal softmax(cap(q k^T * scale)) v within the window; q [N, h, D], k and v [N, g, D] with h
    a multiple of g -> [N, h * D].

    Fused, unless there is dropout or a soft cap: no fused kernel has those.
    """
    explicit = options.softcap or (options.dropout and layout.dropout is not None)
    windowed = not explicit and 0 < options.window < layout.length
    # On CUDA fused kernels for fp32 take no grouped heads; the unfused one holds [h, T, T].
    if explicit or windowed or q.is_cuda:
        k, v = _repeated(k, v, q.shape[1])
    if windowed:
        return _windowed(q, k, v, layout, options)
    q4, k4, v4 = (_by_head(x, layout) for x in (q, k, v))
    if explicit:
        out = _explicit(q4, k4, v4, layout, options)
    else:
        grouped = k4.shape[1] != q4.shape[1]
        out = F.scaled_dot_product_attention(
            q4, k4, v4, is_causal=True, scale=options.scale, enable_gqa=grouped
        )
    result: Tensor = out.transpose(1, 2).reshape(layout.batch * layout.length, -1)
    return result


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


def _windowed(q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: AttentionOptions) -> Tensor:
    """The fused path with a window: each block of queries meets only the keys that it can see, so
    that work and memory grow with T * W and not with T * T.
    """
    batch, length, window = layout.batch, layout.length, options.window
    block = min(max(-(-window // 4), 64), length)
    back, rest = window - 1, -length % block
    q, k, v = (x.unflatten(0, (batch, length)) for x in (q, k, v))
    blocks = F.pad(q, (0, 0, 0, 0, 0, rest)).unflatten(1, (-1, block)).transpose(2, 3)
    # [B, blocks, h, back + block, D] of overlapping stretches.
    keys, values = (
        F.pad(x, (0, 0, 0, 0, back, rest)).unfold(1, back + block, block).transpose(3, 4)
        for x in (k, v)
    )
    query = torch.arange(block, device=q.device).unsqueeze(1)
    key = torch.arange(back + block, device=q.device)
    first = torch.arange(0, length, block, device=q.device).view(-1, 1, 1) - back
    seen = (key >= query) & (key <= query + back) & (first + key >= 0)
    out = F.scaled_dot_product_attention(
        blocks.flatten(0, 1),
        keys.flatten(0, 1),
        values.flatten(0, 1),
        attn_mask=seen.repeat(batch, 1, 1).unsqueeze(1),
        scale=options.scale,
    )
    rows: Tensor = out.transpose(1, 2).flatten(2).unflatten(0, (batch, -1)).flatten(1, 2)
    return rows[:, :length].flatten(0, 1)


class _Softmax(torch.autograd.Function):
    """Softmax over what is not hidden, in the dtype of the scores. Only the result is kept, as it
    is handed out: where it is 0, so is the gradient.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.wide = scores.dtype
        probs = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1).to(dtype)
        ctx.save_for_backward(probs)
        return probs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (probs,) = ctx.saved_tensors
        wide = ctx.wide
        grad = _aten._softmax_backward_data(grads[0].to(wide), probs.to(wide), -1, wide)
        return grad, None, None


def _explicit(q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: AttentionOptions) -> Tensor:
    """The path that makes the scores [B, h, T, T]; cap and softmax in fp32 or wider."""
    heads, length = q.shape[1], layout.length
    place = layout.index.view(layout.batch, 1, length)
    query, key = place.unsqueeze(3), place.unsqueeze(2)
    hidden = key > query
    if options.window:
        hidden |= key <= query - options.window
    scores = (q @ k.transpose(-1, -2)) * options.scale
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    if options.softcap:
        scores = soft_cap(scores, options.softcap)
    probs: Tensor = _Softmax.apply(scores, hidden, q.dtype)
    if not options.dropout or layout.dropout is None:
        return probs @ v
    head = torch.arange(options.first_head, options.first_head + heads, device=q.device)
    index = ((head.view(1, -1, 1, 1) * length + query) * length, key)
    return dropout(probs, layout.dropout, options.layer, options.site, index, options.dropout) @ v


def _repeated(k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """k and v [N, g, D] with every head as often as query heads share it: [N, heads, D]."""
    groups = heads // k.shape[1]
    if groups == 1:
        return k, v
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
