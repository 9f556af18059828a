"""Presets: published models and small ones for a laptop, as the fields that a user would write.

Owns names and numbers. Parameter counts follow from them (placement.num_params) and are asserted by
a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankmesh.errors import ConfigError
from rankmesh.specs.model import SPEC_FIELDS, ModelSpec, make_spec, nearest


def _gpt2(num_layers: int, hidden_size: int, num_heads: int, **rest: Any) -> dict[str, Any]:
    sizes = {"num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads}
    return {"family": "gpt2", **sizes, "vocab_size": 50257, "max_seq_len": 1024, **rest}


def _llama(
    num_layers: int, hidden_size: int, num_heads: int, num_kv_heads: int, ffn_size: int, **rest: Any
) -> dict[str, Any]:
    return {
        "family": "llama",
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "ffn_size": ffn_size,
        **rest,
    }


def _scaling(factor: float) -> dict[str, Any]:
    return {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_seq_len": 8192,
    }


_LLAMA_2: dict[str, Any] = {"vocab_size": 32000, "max_seq_len": 4096}
_LLAMA_3: dict[str, Any] = {"vocab_size": 128256, "max_seq_len": 8192, "rope_theta": 500000.0}
_LLAMA_31: dict[str, Any] = {**_LLAMA_3, "max_seq_len": 131072, "rope_scaling": _scaling(8.0)}
_LLAMA_32: dict[str, Any] = {**_LLAMA_31, "rope_scaling": _scaling(32.0), "tie_embeddings": True}

# The tiny and mini ones are for tests and laptops; their vocabularies suit bytes or a small trained
# tokenizer.
_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt2-tiny": _gpt2(2, 64, 4, vocab_size=512, max_seq_len=128),
    "gpt2-mini": _gpt2(6, 256, 8, vocab_size=4096, max_seq_len=512),
    "llama-tiny": _llama(2, 64, 4, 2, 192, vocab_size=512, max_seq_len=256),
    "llama-mini": _llama(6, 256, 8, 4, 704, vocab_size=4096, max_seq_len=1024),
    "llama-small": _llama(12, 768, 12, 4, 2048, vocab_size=32000, max_seq_len=2048),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, **_LLAMA_2),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824, **_LLAMA_2),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, **_LLAMA_2),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336, **_LLAMA_3),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672, **_LLAMA_3),
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 14336, **_LLAMA_31),
    "llama-3.1-70b": _llama(80, 8192, 64, 8, 28672, **_LLAMA_31),
    "llama-3.1-405b": _llama(126, 16384, 128, 8, 53248, **_LLAMA_31),
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 8192, **_LLAMA_32),
    "llama-3.2-3b": _llama(28, 3072, 24, 8, 8192, **_LLAMA_32),
}


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
