"""From a ModelSpec to an nn.Transformer.

Owns the translation of a spec's words into modules; it knows nothing of meshes. Built on the meta
device the model costs no memory, and its parameters are replaced by slices later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rankmesh import nn
from rankmesh.nn.transformer import Norm
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.rope import LinearScaling, Llama3Scaling, RopeScaling


def build(
    spec: ModelSpec,
    device: torch.device | str = "meta",
    dtype: torch.dtype = torch.float32,
    *,
    layers: range | None = None,
    first: bool = True,
    last: bool = True,
) -> nn.Transformer:
    """The model of `spec`, parameters uninitialised, on `device`.

    A pipeline stage has some of the layers, the first one the embedding, the last one the head
    (and, where they are tied, the table). named_parameters() yields the logical names of
    `specs.placement.param_table`.
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            held = layers if layers is not None else range(spec.num_layers)
            return _transformer(spec, held, first, last)
    finally:
        torch.set_default_dtype(previous)


def _transformer(spec: ModelSpec, layers: range, first: bool, last: bool) -> nn.Transformer:
    tied = spec.tie_embeddings and last
    learned = spec.positions == "learned" and first
    near, far = _rotaries(spec)
    return nn.Transformer(
        embed=nn.Embedding(spec.vocab_size, spec.hidden_size) if first or tied else None,
        positions=nn.Embedding(spec.max_seq_len, spec.hidden_size) if learned else None,
        layers={
            number: _block(spec, number, window, near if window else far)
            for number, window in enumerate(spec.windows)
            if number in layers
        },
        norm=_norm(spec, spec.hidden_size) if last else None,
        head=nn.Linear(spec.hidden_size, spec.vocab_size) if last and not tied else None,
        tied=tied,
        enters=first,
        dropout=spec.dropout,
        embed_scale=spec.hidden_size**0.5 if spec.scale_embedding else 1.0,
        logit_softcap=spec.logit_softcap,
    )


def _rotaries(spec: ModelSpec) -> tuple[nn.Rotary | None, nn.Rotary | None]:
    """Those of local and of global layers, often the same one."""
    if spec.positions != "rotary":
        return None, None
    # The phases are made on the CPU, also while the modules are built on the meta device.
    with torch.device("cpu"):
        plain = nn.frequencies(spec.head_dim, spec.rope_theta)
        far = _rotary(plain, spec.rope_theta, spec.rope_scaling)
        if not spec.rope_local_theta:
            return far, far
        return nn.Rotary(nn.frequencies(spec.head_dim, spec.rope_local_theta)), far


def _rotary(plain: Tensor, theta: float, scaling: RopeScaling | None) -> nn.Rotary:
    if scaling is None:
        return nn.Rotary(plain)
    if isinstance(scaling, LinearScaling):
        return nn.Rotary(plain / scaling.factor)
    if isinstance(scaling, Llama3Scaling):
        return nn.Rotary(
            nn.llama3_scaled(
                plain,
                factor=scaling.factor,
                low=scaling.low_freq_factor,
                high=scaling.high_freq_factor,
                context=scaling.original_max_seq_len,
            )
        )
    stretched = nn.yarn_scaled(
        plain,
        theta=theta,
        factor=scaling.factor,
        slow=scaling.beta_slow,
        fast=scaling.beta_fast,
        context=scaling.original_max_seq_len,
    )
    return nn.Rotary(stretched, scaling.gain)


def _norm(spec: ModelSpec, size: int) -> Norm:
    kinds: dict[str, type[Norm]] = {
        "rmsnorm": nn.RMSNorm,
        "rmsnorm_1p": nn.RMSNorm1p,
        "layernorm": nn.LayerNorm,
    }
    return kinds[spec.norm](size, spec.norm_eps)


def _qk_norm(spec: ModelSpec) -> nn.HeadNorms | nn.ProjectionNorms | None:
    eps = spec.norm_eps
    if spec.qk_norm == "all":
        sizes = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim)
        return nn.ProjectionNorms(*sizes, eps)
    if spec.qk_norm == "head":
        kind = nn.RMSNorm1p if spec.norm == "rmsnorm_1p" else nn.RMSNorm
        return nn.HeadNorms(kind(spec.head_dim, eps), kind(spec.head_dim, eps))
    return None


def _block(spec: ModelSpec, number: int, window: int, rotary: nn.Rotary | None) -> nn.Block:
    before, after = spec.norm_place != "after", spec.norm_place != "before"
    hidden = spec.hidden_size

    def norm(present: bool) -> Norm | torch.nn.Identity:
        return _norm(spec, hidden) if present else torch.nn.Identity()

    return nn.Block(
        number=number,
        rotary=rotary,
        attn_norm=norm(before),
        attn=nn.Attention(
            hidden_size=hidden,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            qkv_bias=spec.qkv_bias,
            out_bias=spec.out_bias,
            qk_norm=_qk_norm(spec),
            options=nn.AttentionOptions(
                layer=number,
                scale=(spec.query_scalar or spec.head_dim) ** -0.5,
                window=window,
                softcap=spec.attention_softcap,
                dropout=spec.attention_dropout,
            ),
        ),
        attn_post_norm=norm(after),
        mlp_norm=norm(before),
        mlp=nn.MLP(
            hidden_size=hidden, ffn_size=spec.ffn_size, activation=spec.mlp, bias=spec.mlp_bias
        ),
        mlp_post_norm=norm(after),
        dropout=spec.dropout,
    )
