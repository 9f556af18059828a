"""What both model families compute, written out: loops over samples, heads and positions.

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
    if spec.positions == "learned":
        x = x + weights["positions.weight"][: len(x)]
    for layer in range(spec.num_layers):
        name = f"layers.{layer}"
        x = x + _attention(
            spec, weights, f"{name}.attn", _norm(spec, weights, f"{name}.attn_norm", x)
        )
        x = x + _mlp(spec, weights, f"{name}.mlp", _norm(spec, weights, f"{name}.mlp_norm", x))
    head = weights["embed.weight" if spec.tie_embeddings else "head.weight"]
    return _norm(spec, weights, "norm", x) @ head.T


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _norm(spec: Any, weights: Weights, name: str, x: Tensor) -> Tensor:
    if spec.norm == "layernorm":
        x = x - x.mean(dim=-1, keepdim=True)
    x = x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + spec.norm_eps)
    x = x * weights[f"{name}.weight"]
    return x + weights[f"{name}.bias"] if spec.norm == "layernorm" else x


def _attention(spec: Any, weights: Weights, name: str, x: Tensor) -> Tensor:
    size = spec.head_dim
    q, k, v = (_linear(weights, f"{name}.{part}", x) for part in "qkv")
    heads = []
    for head in range(spec.num_heads):
        served = head // (spec.num_heads // spec.num_kv_heads)
        rows = []
        for t in range(len(x)):
            query = _turned(spec, q[t, head * size : (head + 1) * size], t)
            seen = [k[s, served * size : (served + 1) * size] for s in range(t + 1)]
            scores = [query @ _turned(spec, key, s) / math.sqrt(size) for s, key in enumerate(seen)]
            parts = torch.exp(torch.stack(scores))
            rows.append(parts / parts.sum() @ v[: t + 1, served * size : (served + 1) * size])
        heads.append(torch.stack(rows))
    return _linear(weights, f"{name}.o", torch.cat(heads, dim=1))


def _turned(spec: Any, x: Tensor, position: int) -> Tensor:
    """x [D] as D/2 complex numbers x[i] + j x[i + D/2], turned by position * frequency i."""
    if spec.positions == "learned":
        return x
    half = spec.head_dim // 2
    turns = [cmath.exp(1j * position * _frequency(spec, i)) for i in range(half)]
    turned = torch.complex(x[:half], x[half:]) * torch.tensor(turns, dtype=torch.complex128)
    return torch.cat([turned.real, turned.imag])


def _frequency(spec: Any, i: int) -> float:
    frequency = float(spec.rope_theta ** (-2 * i / spec.head_dim))
    scaling = spec.rope_scaling
    if scaling is None:
        return frequency
    turns = scaling.original_max_seq_len * frequency / (2 * math.pi)  # within the first context
    if turns >= scaling.high_freq_factor:
        return frequency
    if turns <= scaling.low_freq_factor:
        return frequency / scaling.factor
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return kept * frequency + (1 - kept) * frequency / scaling.factor


def _mlp(spec: Any, weights: Weights, name: str, x: Tensor) -> Tensor:
    up = _linear(weights, f"{name}.up", x)
    if spec.mlp == "swiglu":
        gate = _linear(weights, f"{name}.gate", x)
        y = gate / (1 + torch.exp(-gate)) * up
    elif spec.mlp == "gelu_tanh":
        y = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    else:
        y = 0.5 * up * (1 + torch.erf(up / math.sqrt(2)))
    return _linear(weights, f"{name}.down", y)
