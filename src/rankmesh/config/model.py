"""The keys of [model]: a preset, a folder to start from, or the fields of a ModelSpec.

Owns their doc strings and rules. What fits together is the spec's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rankmesh.config.fields import (
    COUNT,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    OneOf,
    Section,
    option,
    refuse,
)
from rankmesh.specs.model import CHOICES
from rankmesh.specs.rope import ROPE_KINDS


def _one_of(field: str) -> OneOf:
    return OneOf(CHOICES[field])


@dataclass(frozen=True, kw_only=True)
class RopeScalingConfig(Section):
    """[model.rope_scaling]: stretching of rotary frequencies for a longer context."""

    NAME: ClassVar[str] = "model.rope_scaling"

    kind: str = option(
        "llama3",
        "linear stretches all frequencies, llama3 and yarn the low ones",
        OneOf(ROPE_KINDS),
    )
    factor: float = option(8.0, "how much longer the context becomes", POSITIVE)
    original_max_seq_len: int | None = option(
        None, "context, in tokens, before the stretching; llama3's default: 8192", COUNT
    )
    low_freq_factor: float | None = option(
        None, "llama3: wavelengths above context / this are stretched; default: 1", POSITIVE
    )
    high_freq_factor: float | None = option(
        None, "llama3: wavelengths below context / this are kept; default: 4", POSITIVE
    )
    beta_fast: float | None = option(
        None, "yarn: what turns more often than this in the context is kept; default: 32", POSITIVE
    )
    beta_slow: float | None = option(
        None, "yarn: what turns less often than this is stretched; default: 1", POSITIVE
    )
    attention_factor: float | None = option(
        None, "yarn: factor on cosines and sines; default: 0.1 * ln(factor) + 1", NOT_NEGATIVE
    )

    def check(self) -> None:
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            below, above = getattr(self, low), getattr(self, high)
            if below is not None and above is not None and below >= above:
                raise refuse(
                    f"{self.NAME}.{low}", below, f"a number below {high}, which is {above}"
                )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """[model]: a preset, a folder to start from, or fields; fields also change the former two."""

    NAME: ClassVar[str] = "model"

    preset: str | None = option(None, "name of a published or small model, such as llama-tiny")
    init_from: str | None = option(
        None, "folder (Hugging Face, or a checkpoint) whose config and weights to start from"
    )
    family: str | None = option(None, "kind of model", _one_of("family"))
    num_layers: int | None = option(None, "transformer layers", COUNT)
    hidden_size: int | None = option(None, "width of the residual stream", COUNT)
    num_heads: int | None = option(None, "query heads", COUNT)
    num_kv_heads: int | None = option(None, "key and value heads; default: num_heads", COUNT)
    head_dim: int | None = option(None, "width of a head; default: hidden_size / num_heads", COUNT)
    ffn_size: int | None = option(
        None, "inner width of the feed-forward part; default: the family's", COUNT
    )
    vocab_size: int | None = option(None, "number of token ids, unpadded", COUNT)
    max_seq_len: int | None = option(None, "longest sequence in tokens", COUNT)
    norm: str | None = option(
        None, "kind of norm; rmsnorm_1p stores its weights less one", _one_of("norm")
    )
    norm_eps: float | None = option(None, "added to the mean square in norms", POSITIVE)
    norm_place: str | None = option(
        None, "where norms stand: before attention and MLP, after, or around", _one_of("norm_place")
    )
    qk_norm: str | None = option(
        None, "norms of queries and keys: over each head, or over all at once", _one_of("qk_norm")
    )
    mlp: str | None = option(None, "kind of feed-forward part", _one_of("mlp"))
    qkv_bias: bool | None = option(None, "biases on query, key and value")
    out_bias: bool | None = option(None, "bias on the attention output")
    mlp_bias: bool | None = option(None, "biases in the feed-forward part")
    positions: str | None = option(None, "kind of positions", _one_of("positions"))
    window: int | None = option(
        None, "positions that a token of a local layer attends to; 0 = all before it", NOT_NEGATIVE
    )
    window_pattern: str | None = option(
        None, "which layers are local (L) and global (G), repeated, such as LLLLLG"
    )
    rope_theta: float | None = option(None, "base of rotary frequencies", POSITIVE)
    rope_scaling: RopeScalingConfig | None = option(None, "stretching of rotary frequencies")
    rope_local_theta: float | None = option(
        None, "base in local layers, which are then not stretched; 0 = as in global", NOT_NEGATIVE
    )
    query_scalar: float | None = option(
        None, "scores are divided by its square root; 0 = head_dim", NOT_NEGATIVE
    )
    attention_softcap: float | None = option(
        None, "soft cap of scores; above 0 attention is not fused", NOT_NEGATIVE
    )
    logit_softcap: float | None = option(None, "soft cap of logits; 0 = none", NOT_NEGATIVE)
    tie_embeddings: bool | None = option(None, "whether embedding and head share one matrix")
    scale_embedding: bool | None = option(
        None, "whether embeddings are multiplied with the square root of hidden_size"
    )
    dropout: float | None = option(None, "dropout on embedding and residual branches", FRACTION)
    attention_dropout: float | None = option(
        None, "dropout on attention weights; above 0 attention is not fused", FRACTION
    )
    init_std: float | None = option(None, "standard deviation of initial matrices", NOT_NEGATIVE)
    scale_residual_init: bool | None = option(
        None, "divide init_std by sqrt(2 * num_layers) where a layer writes to the residual stream"
    )

    def check(self) -> None:
        if self.preset is not None and self.init_from is not None:
            raise refuse(
                "model.init_from",
                self.init_from,
                "no model.preset beside it: the folder names the model",
            )
