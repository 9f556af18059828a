"""Presets: published models and small ones for a laptop, as the fields that a user would write.

Owns names and numbers. Parameter counts follow from them (placement.num_params) and are asserted by
a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankmesh.errors import ConfigError
from rankmesh.specs.checks import nearest
from rankmesh.specs.model import SPEC_FIELDS, ModelSpec, make_spec

Fields = dict[str, Any]


def _gpt2(num_layers: int, hidden_size: int, num_heads: int, **rest: Any) -> Fields:
    sizes = {"num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads}
    return {"family": "gpt2", **sizes, "vocab_size": 50257, "max_seq_len": 1024, **rest}


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **rest: Any) -> Fields:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "ffn_size": ffn,
        **rest,
    }


def _scaling(factor: float) -> Fields:
    return {"kind": "llama3", "factor": factor, "original_max_seq_len": 8192}


_LINEAR_8: Fields = {"kind": "linear", "factor": 8.0}
_LLAMA_2: Fields = {"family": "llama", "vocab_size": 32000, "max_seq_len": 4096}
_LLAMA_3: Fields = {
    "family": "llama",
    "vocab_size": 128256,
    "max_seq_len": 8192,
    "rope_theta": 500000.0,
}
_LLAMA_31: Fields = {**_LLAMA_3, "max_seq_len": 131072, "rope_scaling": _scaling(8.0)}
_LLAMA_32: Fields = {**_LLAMA_31, "rope_scaling": _scaling(32.0), "tie_embeddings": True}
_SMOLLM: Fields = {
    "family": "llama",
    "vocab_size": 49152,
    "max_seq_len": 2048,
    "tie_embeddings": True,
}
_SMOLLM2: Fields = {**_SMOLLM, "max_seq_len": 8192, "rope_theta": 100000.0}
_MISTRAL: Fields = {"family": "mistral", "head_dim": 128, "max_seq_len": 32768}
_QWEN_25: Fields = {
    "family": "qwen2",
    "vocab_size": 152064,
    "max_seq_len": 131072,
    "rope_theta": 1e6,
}
_QWEN_25_SMALL: Fields = {
    **_QWEN_25,
    "vocab_size": 151936,
    "max_seq_len": 32768,
    "tie_embeddings": True,
}
_QWEN_3: Fields = {
    "family": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "max_seq_len": 40960,
    "rope_theta": 1e6,
}
_QWEN_3_SMALL: Fields = {**_QWEN_3, "tie_embeddings": True}
_GEMMA_2: Fields = {"family": "gemma2", "head_dim": 256, "vocab_size": 256000, "max_seq_len": 8192}
_GEMMA_3: Fields = {
    "family": "gemma3",
    "head_dim": 256,
    "vocab_size": 262208,
    "max_seq_len": 131072,
    "rope_scaling": _LINEAR_8,
}
_GEMMA_3_SMALL: Fields = {
    **_GEMMA_3,
    "vocab_size": 262144,
    "max_seq_len": 32768,
    "rope_scaling": None,
    "window": 512,
}
_OLMO_2: Fields = {"family": "olmo2", "vocab_size": 100352, "max_seq_len": 4096}
_PHI_3: Fields = {"family": "phi3", "vocab_size": 32064, "max_seq_len": 4096, "window": 2047}
_TINY: Fields = {"vocab_size": 512, "max_seq_len": 256}

# The tiny and mini ones are for tests and laptops; their vocabularies suit bytes or a small trained
# tokenizer.
_PRESETS: Mapping[str, Fields] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt2-tiny": _gpt2(2, 64, 4, vocab_size=512, max_seq_len=128),
    "gpt2-mini": _gpt2(6, 256, 8, vocab_size=4096, max_seq_len=512),
    "llama-tiny": _sizes(2, 64, 4, 2, 192, family="llama", **_TINY),
    "llama-mini": _sizes(6, 256, 8, 4, 704, family="llama", vocab_size=4096, max_seq_len=1024),
    "llama-small": _sizes(12, 768, 12, 4, 2048, **_LLAMA_2 | {"max_seq_len": 2048}),
    "llama-2-7b": _sizes(32, 4096, 32, 32, 11008, **_LLAMA_2),
    "llama-2-13b": _sizes(40, 5120, 40, 40, 13824, **_LLAMA_2),
    "llama-2-70b": _sizes(80, 8192, 64, 8, 28672, **_LLAMA_2),
    "llama-3-8b": _sizes(32, 4096, 32, 8, 14336, **_LLAMA_3),
    "llama-3-70b": _sizes(80, 8192, 64, 8, 28672, **_LLAMA_3),
    "llama-3.1-8b": _sizes(32, 4096, 32, 8, 14336, **_LLAMA_31),
    "llama-3.1-70b": _sizes(80, 8192, 64, 8, 28672, **_LLAMA_31),
    "llama-3.1-405b": _sizes(126, 16384, 128, 8, 53248, **_LLAMA_31),
    "llama-3.2-1b": _sizes(16, 2048, 32, 8, 8192, **_LLAMA_32),
    "llama-3.2-3b": _sizes(28, 3072, 24, 8, 8192, **_LLAMA_32),
    "smollm-135m": _sizes(30, 576, 9, 3, 1536, **_SMOLLM),
    "smollm-360m": _sizes(32, 960, 15, 5, 2560, **_SMOLLM),
    "smollm-1.7b": _sizes(24, 2048, 32, 32, 8192, **_SMOLLM),
    "smollm2-135m": _sizes(30, 576, 9, 3, 1536, **_SMOLLM2),
    "smollm2-360m": _sizes(32, 960, 15, 5, 2560, **_SMOLLM2),
    "smollm2-1.7b": _sizes(24, 2048, 32, 32, 8192, **_SMOLLM2 | {"rope_theta": 130000.0}),
    "mistral-tiny": _sizes(2, 64, 4, 2, 192, family="mistral", window=64, **_TINY),
    "mistral-7b": _sizes(32, 4096, 32, 8, 14336, vocab_size=32000, window=4096, **_MISTRAL),
    "mistral-7b-v0.3": _sizes(
        32, 4096, 32, 8, 14336, vocab_size=32768, rope_theta=1e6, **_MISTRAL
    ),
    "mistral-nemo-12b": _sizes(
        40, 5120, 32, 8, 14336, vocab_size=131072, rope_theta=1e6,
        **_MISTRAL | {"max_seq_len": 131072},
    ),
    "qwen2-tiny": _sizes(2, 64, 4, 2, 192, family="qwen2", **_TINY),
    "qwen2.5-0.5b": _sizes(24, 896, 14, 2, 4864, **_QWEN_25_SMALL),
    "qwen2.5-1.5b": _sizes(28, 1536, 12, 2, 8960, **_QWEN_25_SMALL | {"max_seq_len": 131072}),
    "qwen2.5-3b": _sizes(36, 2048, 16, 2, 11008, **_QWEN_25_SMALL),
    "qwen2.5-7b": _sizes(28, 3584, 28, 4, 18944, **_QWEN_25),
    "qwen2.5-14b": _sizes(48, 5120, 40, 8, 13824, norm_eps=1e-5, **_QWEN_25),
    "qwen2.5-32b": _sizes(64, 5120, 40, 8, 27648, norm_eps=1e-5, **_QWEN_25),
    "qwen2.5-72b": _sizes(80, 8192, 64, 8, 29568, norm_eps=1e-5, **_QWEN_25),
    "qwen3-tiny": _sizes(2, 64, 4, 2, 192, family="qwen3", **_TINY),
    "qwen3-0.6b": _sizes(28, 1024, 16, 8, 3072, **_QWEN_3_SMALL),
    "qwen3-1.7b": _sizes(28, 2048, 16, 8, 6144, **_QWEN_3_SMALL),
    "qwen3-4b": _sizes(36, 2560, 32, 8, 9728, **_QWEN_3_SMALL),
    "qwen3-8b": _sizes(36, 4096, 32, 8, 12288, **_QWEN_3),
    "qwen3-14b": _sizes(40, 5120, 40, 8, 17408, **_QWEN_3),
    "qwen3-32b": _sizes(64, 5120, 64, 8, 25600, **_QWEN_3),
    "gemma2-tiny": _sizes(4, 64, 4, 2, 192, family="gemma2", window=64, **_TINY),
    "gemma2-2b": _sizes(26, 2304, 8, 4, 9216, **_GEMMA_2),
    "gemma2-9b": _sizes(42, 3584, 16, 8, 14336, **_GEMMA_2),
    "gemma2-27b": _sizes(
        46, 4608, 32, 16, 36864, query_scalar=144.0, **_GEMMA_2 | {"head_dim": 128}
    ),
    "gemma3-tiny": _sizes(6, 64, 4, 2, 192, family="gemma3", window=64, **_TINY),
    "gemma3-270m": _sizes(18, 640, 4, 1, 2048, **_GEMMA_3_SMALL),
    "gemma3-1b": _sizes(26, 1152, 4, 1, 6912, **_GEMMA_3_SMALL),
    "gemma3-4b": _sizes(34, 2560, 8, 4, 10240, **_GEMMA_3),
    "gemma3-12b": _sizes(48, 3840, 16, 8, 15360, **_GEMMA_3),
    "gemma3-27b": _sizes(
        62, 5376, 32, 16, 21504, query_scalar=168.0, **_GEMMA_3 | {"head_dim": 128}
    ),
    "olmo2-tiny": _sizes(2, 64, 4, 4, 192, family="olmo2", **_TINY),
    "olmo2-1b": _sizes(16, 2048, 16, 16, 8192, **_OLMO_2),
    "olmo2-7b": _sizes(32, 4096, 32, 32, 11008, **_OLMO_2),
    "olmo2-13b": _sizes(40, 5120, 40, 40, 13824, **_OLMO_2),
    "olmo2-32b": _sizes(64, 5120, 40, 8, 27648, **_OLMO_2),
    "phi3-tiny": _sizes(2, 64, 4, 4, 192, family="phi3", **_TINY),
    "phi3-mini": _sizes(32, 3072, 32, 32, 8192, **_PHI_3),
    "phi3-medium": _sizes(40, 5120, 40, 10, 17920, **_PHI_3),
    "phi-4": _sizes(
        40, 5120, 40, 10, 17920, rope_theta=250000.0,
        **_PHI_3 | {"vocab_size": 100352, "max_seq_len": 16384, "window": 0},
    ),
}  # fmt: skip


def names() -> tuple[str, ...]:
    """Every preset's name, in reading order."""
    return tuple(_PRESETS)


def preset(name: str, **overrides: Any) -> ModelSpec:
    """The preset `name`, with fields of ModelSpec changed by `overrides` (None: not given).

    Fields that the preset leaves to its family (head_dim, GPT-2's ffn_size) follow the overridden
    sizes. Raises ConfigError naming the nearest preset or field.
    """
    if name not in _PRESETS:
        raise ConfigError(f"model.preset is {name!r}{nearest(name, _PRESETS)}")
    for field in overrides:
        if field not in SPEC_FIELDS:
            raise ConfigError(f"model.{field} is not a field{nearest(field, SPEC_FIELDS)}")
    given = {field: value for field, value in overrides.items() if value is not None}
    return make_spec(**{**_PRESETS[name], **given})
