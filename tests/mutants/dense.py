"""What all model families compute, written out: loops over samples, heads and positions.

An outside judge of `nn`, which the oracle shares with the mesh. It imports torch only; the
gradients are autograd's.

Letters: T positions of a sample, H hidden, D head dim, V vocabulary.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def loss(spec: Any, weights: Weights, tokens: Tensor, labels: Tensor) -> Tensor:
    """Sum over labels >= 0 of the cross entropy; tokens and labels [B, T], `weights` by logical
    name, `spec` anything with the fields of a ModelSpec.
    """
    total = torch.zeros((), dtype=torch.float64)
    for sample, wanted in zip(tokens, labels, strict=True):
        for row, label in zip(logits(spec, weights, sample), wanted.tolist(), strict=True):
            if label >= 0:
                total = total - torch.log(torch.exp(row)[label] / torch.exp(row).sum())
    return total


def logits(spec: Any, weights: Weights, tokens: Tensor) -> Tensor:
    """[T, V] of one sample [T]."""
    x = torch.stack([weights["embed.weight"][token] for token in tokens.tolist()])
    if spec.scale_embedding:
        x = x * math.sqrt(spec.hidden_size)
    if spec.positions == "learned":
        x = x + weights["positions.weight"][: len(x)]
    for layer in range(spec.num_layers):
        for part, branch in (("attn", _attention), ("mlp", _mlp)):
            name = f"layers.{layer}.{part}"
            y = _norm(spec, weights, f"{name}_norm", x) if spec.norm_place != "after" else x
            y = branch(spec, weights, name, y)
            after = spec.norm_place != "before"
            x = x + (_norm(spec, weights, f"{name}_post_norm", y) if after else y)
    head = weights["embed.weight" if spec.tie_embeddings else "head.weight"]
    return _capped(spec.logit_softcap, _norm(spec, weights, "norm", x) @ head.T)


def _capped(cap: float, x: Tensor) -> Tensor:
    """tanh by exponentials, scaled to the cap."""
    return cap * (1 - 2 / (torch.exp(2 * x / cap) + 1)) if cap else x


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _norm(spec: Any, weights: Weights, name: str, x: Tensor) -> Tensor:
    if spec.norm == "layernorm":
        x = x - x.mean(dim=-1, keepdim=True)
    x = x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + spec.norm_eps)
    x = x * (weights[f"{name}.weight"] + (1 if spec.norm == "rmsnorm_1p" else 0))
    return x + weights[f"{name}.bias"] if spec.norm == "layernorm" else x


def _attention(spec: Any, weights: Weights, name: str, x: Tensor) -> Tensor:
    size, layer = spec.head_dim, int(name.split(".")[1])
    window = spec.windows[layer] or len(x)
    q, k, v = (_linear(weights, f"{name}.{part}", x) for part in "qkv")
    q, k = (
        _normed_heads(spec, weights, f"{name}.qk_norm.{part}", y)
        for part, y in (("q", q), ("k", k))
    )
    heads = []
    for head in range(spec.num_heads):
        served = head // (spec.num_heads // spec.num_kv_heads)
        rows = []
        for t in range(len(x)):
            query = _turned(spec, layer, q[t, head * size : (head + 1) * size], t)
            scores = []
            for s in range(max(0, t + 1 - window), t + 1):
                key = _turned(spec, layer, k[s, served * size : (served + 1) * size], s)
                scores.append(query @ key / math.sqrt(spec.query_scalar or size))
            parts = torch.exp(_capped(spec.attention_softcap, torch.stack(scores)))
            values = v[t + 1 - len(scores) : t + 1, served * size : (served + 1) * size]
            rows.append(parts / parts.sum() @ values)
        heads.append(torch.stack(rows))
    return _linear(weights, f"{name}.o", torch.cat(heads, dim=1))


def _normed_heads(spec: Any, weights: Weights, name: str, x: Tensor) -> Tensor:
    """Queries or keys [T, heads * D] normed over each head, over all of them, or not."""
    if spec.qk_norm == "all":
        return _norm(spec, weights, name, x)
    if spec.qk_norm == "head":
        heads = x.split(spec.head_dim, dim=1)
        return torch.cat([_norm(spec, weights, name, head) for head in heads], dim=1)
    return x


def _turned(spec: Any, layer: int, x: Tensor, position: int) -> Tensor:
    """x [D] as D/2 complex numbers x[i] + j x[i + D/2], turned by position * frequency i."""
    if spec.positions == "learned":
        return x
    half = spec.head_dim // 2
    turns = [cmath.exp(1j * position * _frequency(spec, layer, i)) for i in range(half)]
    turned = torch.complex(x[:half], x[half:]) * torch.tensor(turns, dtype=torch.complex128)
    gain = 1.0
    if spec.rope_scaling is not None and spec.rope_scaling.kind == "yarn":
        gain = 0.1 * math.log(spec.rope_scaling.factor) + 1
    return torch.cat([turned.real, turned.imag]) * gain


def _frequency(spec: Any, layer: int, i: int) -> float:
    if spec.windows[layer] and spec.rope_local_theta:
        return float(spec.rope_local_theta ** (-2 * i / spec.head_dim))
    frequency = float(spec.rope_theta ** (-2 * i / spec.head_dim))
    scaling = spec.rope_scaling
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "yarn":
        first, last = (_pair(spec, turns) for turns in (scaling.beta_fast, scaling.beta_slow))
        first, last = max(math.floor(first), 0), math.ceil(last)
        stretched = min(max((i - first) / (last - first), 0), 1)
        return frequency * (1 - stretched) + frequency / scaling.factor * stretched
    turns = scaling.original_max_seq_len * frequency / (2 * math.pi)  # within the first context
    if turns >= scaling.high_freq_factor:
        return frequency
    if turns <= scaling.low_freq_factor:
        return frequency / scaling.factor
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return kept * frequency + (1 - kept) * frequency / scaling.factor


def _pair(spec: Any, turns: float) -> float:
    """The number, not whole, of the pair that turns so often within the first context."""
    slowest = spec.rope_scaling.original_max_seq_len / (2 * math.pi * turns)
    return spec.head_dim / 2 * math.log(slowest, spec.rope_theta)


def _mlp(spec: Any, weights: Weights, name: str, x: Tensor) -> Tensor:
    up = _linear(weights, f"{name}.up", x)
    if spec.mlp == "swiglu":
        gate = _linear(weights, f"{name}.gate", x)
        y = gate / (1 + torch.exp(-gate)) * up
    elif spec.mlp == "geglu_tanh":
        y = _gelu_tanh(_linear(weights, f"{name}.gate", x)) * up
    elif spec.mlp == "gelu_tanh":
        y = _gelu_tanh(up)
    else:
        y = 0.5 * up * (1 + torch.erf(up / math.sqrt(2)))
    return _linear(weights, f"{name}.down", y)


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
