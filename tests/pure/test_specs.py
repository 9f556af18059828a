"""ModelSpec: what can be made, what is refused and how the refusal reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rankmesh.errors import ConfigError
from rankmesh.specs.families import FAMILIES
from rankmesh.specs.model import ModelSpec, RopeScaling, make_spec

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_heads": 6,
    "vocab_size": 61,
    "max_seq_len": 32,
}


def test_the_family_fills_in_the_rest() -> None:
    llama = make_spec(family="llama", **SIZES)
    assert (llama.norm, llama.mlp, llama.positions) == ("rmsnorm", "swiglu", "rotary")
    assert (llama.num_kv_heads, llama.head_dim, llama.tie_embeddings) == (6, 8, False)
    assert not (llama.qkv_bias or llama.out_bias or llama.mlp_bias or llama.scale_residual_init)
    gpt2 = make_spec(family="gpt2", **SIZES)
    assert (gpt2.norm, gpt2.mlp, gpt2.positions) == ("layernorm", "gelu_tanh", "learned")
    assert (gpt2.ffn_size, gpt2.tie_embeddings, gpt2.scale_residual_init) == (192, True, True)
    assert gpt2.qkv_bias and gpt2.out_bias and gpt2.mlp_bias


def test_llama_feed_forward_size_is_that_of_the_published_models() -> None:
    family = FAMILIES["llama"]
    assert [family.default_ffn_size(hidden) for hidden in (4096, 5120)] == [11008, 13824]


def test_defaults_leave_dropout_off() -> None:
    for family in FAMILIES:
        spec = make_spec(family=family, **SIZES)
        assert (spec.dropout, spec.attention_dropout) == (0.0, 0.0)


def test_a_spec_survives_json_values() -> None:
    scaling = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=16
    )
    spec = make_spec(family="llama", num_kv_heads=2, rope_scaling=scaling, **SIZES)
    values = spec.to_dict()
    assert isinstance(values["rope_scaling"], dict)
    assert make_spec(**values) == spec


def test_none_means_not_given() -> None:
    assert make_spec(family="llama", head_dim=None, rope_theta=None, **SIZES) == make_spec(
        family="llama", **SIZES
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"family": "lama"}, ["model.family", "'lama'", "llama, gpt2"]),
        ({"family": ["llama"]}, ["model.family", "llama, gpt2"]),
        ({"num_layers": 0}, ["model.num_layers", "0", "at least 1"]),
        ({"num_layers": None}, ["model.num_layers", "missing"]),
        ({"vocab_size": 61.0}, ["model.vocab_size", "61.0", "whole number"]),
        ({"hidden_size": True}, ["model.hidden_size", "True"]),
        ({"num_kv_heads": 4}, ["num_kv_heads 4", "num_heads 6", "allowed: 1, 2, 3, 6"]),
        ({"num_heads": 7}, ["num_heads 7", "hidden_size 48", "head_dim"]),
        ({"head_dim": 7}, ["head_dim 7", "odd", "rotary"]),
        ({"norm": "batchnorm"}, ["model.norm", "'batchnorm'", "rmsnorm, layernorm"]),
        ({"norm": "layernorm"}, ["model.norm", "'layernorm'", "family llama", "rmsnorm"]),
        ({"mlp": "gelu"}, ["model.mlp", "family llama", "swiglu"]),
        ({"positions": "learned"}, ["model.positions", "family llama", "rotary"]),
        ({"qkv_bias": 1}, ["model.qkv_bias", "true, false"]),
        ({"dropout": 1.0}, ["model.dropout", "1.0", "below 1"]),
        ({"attention_dropout": -0.1}, ["model.attention_dropout", "-0.1", "at least 0"]),
        ({"norm_eps": 0.0}, ["model.norm_eps", "above 0"]),
        ({"rope_theta": float("nan")}, ["model.rope_theta", "nan"]),
        ({"init_std": "small"}, ["model.init_std", "'small'", "a number"]),
        ({"num_layer": 2}, ["model.num_layer", "did you mean num_layers?"]),
        ({"rope_scaling": 8.0}, ["model.rope_scaling", "8.0"]),
        ({"rope_scaling": {"factr": 8.0}}, ["rope_scaling.factr", "did you mean factor?"]),
        ({"rope_scaling": {"factor": 8.0}}, ["rope_scaling.low_freq_factor", "missing"]),
    ],
)
def test_mistakes_are_one_line_with_the_value_and_what_is_allowed(
    changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_spec(**{"family": "llama", **SIZES, **changes})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_rope_scaling_needs_rotary_positions_and_ordered_factors() -> None:
    with pytest.raises(ConfigError, match="low_freq_factor 4.0 must be below high_freq_factor 1.0"):
        RopeScaling(factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0, original_max_seq_len=16)
    scaling = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=16
    )
    with pytest.raises(ConfigError, match="rope_scaling needs rotary positions"):
        make_spec(family="gpt2", rope_scaling=scaling, **SIZES)


def test_checks_also_run_when_a_field_is_replaced() -> None:
    spec = make_spec(family="llama", **SIZES)
    with pytest.raises(ConfigError, match="num_kv_heads 5"):
        dataclasses.replace(spec, num_kv_heads=5)


def test_query_heads_that_do_not_divide_are_refused() -> None:
    """Field report T01: 6 query heads with 4 KV heads is an error that names both."""
    with pytest.raises(ConfigError, match="num_kv_heads 4 does not divide num_heads 6"):
        make_spec(family="llama", **{**SIZES, "num_heads": 6, "num_kv_heads": 4})


def test_a_spec_is_equal_by_value_and_frozen() -> None:
    first, second = (make_spec(family="llama", **SIZES) for _ in range(2))
    assert first == second and hash(first) == hash(second)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(first, "num_layers", 3)  # noqa: B010
    assert isinstance(first, ModelSpec)
