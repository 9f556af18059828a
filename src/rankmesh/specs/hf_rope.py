"""Rotary positions in Hugging Face's words, in and out.

Owns the two ways of writing them: `rope_parameters` (transformers 5), and `rope_theta` beside
`rope_scaling` (before), which is what we write because both read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log
from typing import Any, NoReturn

from rankmesh.errors import CheckpointError
from rankmesh.specs.hf_dialects import Dialect
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

Table = Mapping[str, Any]
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def refuse(key: str, value: object, allowed: Iterable[object]) -> NoReturn:
    """Raises CheckpointError: what config.json says, and what can be read."""
    raise CheckpointError(
        f"config.json: {key} is {value!r}; can be read: {', '.join(map(str, allowed))}"
    )


def rope_in(dialect: Dialect, config: Table, max_seq_len: int) -> dict[str, Any]:
    """Our fields of rotary positions; raises CheckpointError naming what we cannot express."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    local: Table = {}
    if dialect.local_rope and (_GLOBAL in rope or _LOCAL in rope):
        rope, local = rope.get(_GLOBAL) or {}, rope.get(_LOCAL) or {}
    for key, value in rope.items():
        if isinstance(value, Mapping):
            refuse("rope_parameters", f"a table with {key}", ["one table for all layers"])
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        refuse("partial_rotary_factor", partial, [1.0])
    found = {
        "rope_theta": rope.get("rope_theta") or _or_absent(dialect, config, "rope_theta"),
        "rope_scaling": _scaling_in(dialect, rope, max_seq_len),
    }
    if dialect.local_rope:
        kind = local.get("rope_type", "default")
        if kind != "default":
            refuse(f"rope_type of {_LOCAL}", kind, ["default"])
        theta = local.get("rope_theta") or _or_absent(dialect, config, "rope_local_base_freq")
        found["rope_local_theta"] = theta
    return found


def rope_out(dialect: Dialect, spec: ModelSpec) -> dict[str, Any]:
    """The keys of rotary positions; {} for a model without them."""
    if spec.positions != "rotary":
        return {}
    keys = {"rope_theta": spec.rope_theta, "rope_scaling": _scaling_out(spec.rope_scaling)}
    if dialect.local_rope:
        keys["rope_local_base_freq"] = spec.rope_local_theta
    return keys


def _or_absent(dialect: Dialect, config: Table, key: str) -> Any:
    return config.get(key, dialect.absent.get(key))


def _scaling_in(dialect: Dialect, rope: Table, max_seq_len: int) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in dialect.rope_kinds:
        refuse("rope_type", kind, dialect.rope_kinds)
    original = rope.get("original_max_position_embeddings") or max_seq_len
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=_needed(rope, kind, "factor"))
    if kind == "llama3":
        return Llama3Scaling(
            factor=_needed(rope, kind, "factor"),
            low_freq_factor=_needed(rope, kind, "low_freq_factor"),
            high_freq_factor=_needed(rope, kind, "high_freq_factor"),
            original_max_seq_len=original,
        )
    if not rope.get("truncate", True):
        refuse("truncate of yarn", False, [True])
    factor = rope.get("factor") or max_seq_len / original
    return YarnScaling(
        factor=factor,
        original_max_seq_len=original,
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        attention_factor=_attention_factor(rope, factor),
    )


def _needed(rope: Table, kind: str, key: str) -> Any:
    if rope.get(key) is None:
        raise CheckpointError(f"config.json: rope_type {kind} needs {key}, which is missing")
    return rope[key]


def _attention_factor(rope: Table, factor: float) -> float:
    """The number given, or what `mscale` and `mscale_all_dim` amount to; 0 for YaRN's own rule."""
    given, over, under = (rope.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)
    if not over or not under or factor <= 1:
        return 0.0
    return float((0.1 * over * log(factor) + 1.0) / (0.1 * under * log(factor) + 1.0))


def _scaling_out(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    keys: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if isinstance(scaling, LinearScaling):
        return keys
    if isinstance(scaling, Llama3Scaling):
        keys["low_freq_factor"] = scaling.low_freq_factor
        keys["high_freq_factor"] = scaling.high_freq_factor
    else:
        keys["beta_fast"], keys["beta_slow"] = scaling.beta_fast, scaling.beta_slow
        if scaling.attention_factor:
            keys["attention_factor"] = scaling.attention_factor
    keys["original_max_position_embeddings"] = scaling.original_max_seq_len
    return keys
