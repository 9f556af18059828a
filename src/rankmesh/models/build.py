"""From a ModelSpec to an nn.Transformer.

Owns the translation of a spec's words into modules; it knows nothing of meshes. Built on the meta
device the model costs no memory, and its parameters are replaced by slices later.
"""

from __future__ import annotations

import torch

from rankmesh import nn
from rankmesh.nn.transformer import Norm
from rankmesh.specs.model import ModelSpec


def build(
    spec: ModelSpec, device: torch.device | str = "meta", dtype: torch.dtype = torch.float32
) -> nn.Transformer:
    """The whole model of `spec`, parameters uninitialised, on `device`.

    named_parameters() yields the logical names of `specs.placement.param_table`.
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return _transformer(spec)
    finally:
        torch.set_default_dtype(previous)


def _transformer(spec: ModelSpec) -> nn.Transformer:
    learned = spec.positions == "learned"
    return nn.Transformer(
        embed=nn.Embedding(spec.vocab_size, spec.hidden_size),
        positions=nn.Embedding(spec.max_seq_len, spec.hidden_size) if learned else None,
        rotary=None if learned else _rotary(spec),
        layers={number: _block(spec, number) for number in range(spec.num_layers)},
        norm=_norm(spec),
        head=None if spec.tie_embeddings else nn.Linear(spec.hidden_size, spec.vocab_size),
        tied=spec.tie_embeddings,
        dropout=spec.dropout,
    )


def _rotary(spec: ModelSpec) -> nn.Rotary:
    scaling = spec.rope_scaling
    # The phases are made on the CPU, also while the modules are built on the meta device.
    with torch.device("cpu"):
        return nn.Rotary(
            spec.head_dim,
            spec.rope_theta,
            None
            if scaling is None
            else nn.RotaryScaling(
                factor=scaling.factor,
                low_freq_factor=scaling.low_freq_factor,
                high_freq_factor=scaling.high_freq_factor,
                original_max_seq_len=scaling.original_max_seq_len,
            ),
        )


def _norm(spec: ModelSpec) -> Norm:
    kind = nn.RMSNorm if spec.norm == "rmsnorm" else nn.LayerNorm
    return kind(spec.hidden_size, spec.norm_eps)


def _block(spec: ModelSpec, number: int) -> nn.Block:
    options = nn.AttentionOptions(
        layer=number, scale=spec.head_dim**-0.5, dropout=spec.attention_dropout
    )
    return nn.Block(
        number=number,
        attn_norm=_norm(spec),
        attn=nn.Attention(
            hidden_size=spec.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            qkv_bias=spec.qkv_bias,
            out_bias=spec.out_bias,
            options=options,
        ),
        mlp_norm=_norm(spec),
        mlp=nn.MLP(
            hidden_size=spec.hidden_size,
            ffn_size=spec.ffn_size,
            activation=spec.mlp,
            bias=spec.mlp_bias,
        ),
        dropout=spec.dropout,
    )
