"""ModelSpec: what can be made, what is refused and how the refusal reads."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from rankmesh.errors import ConfigError
from rankmesh.specs.families import FAMILIES
from rankmesh.specs.model import ModelSpec, make_spec, shortest_pattern
from rankmesh.specs.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

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


def test_what_makes_the_other_families() -> None:
    specs = {family: make_spec(family=family, **SIZES) for family in FAMILIES}
    assert specs["qwen2"].qkv_bias and not specs["qwen2"].out_bias
    assert {name for name, spec in specs.items() if spec.qk_norm == "head"} == {"qwen3", "gemma3"}
    assert specs["olmo2"].qk_norm == "all"
    places = {name: spec.norm_place for name, spec in specs.items() if spec.norm_place != "before"}
    assert places == {"gemma2": "around", "gemma3": "around", "olmo2": "after"}
    gemma2, gemma3 = specs["gemma2"], specs["gemma3"]
    assert (gemma2.attention_softcap, gemma2.logit_softcap) == (50.0, 30.0)
    assert (gemma3.attention_softcap, gemma3.logit_softcap) == (0.0, 0.0)
    assert (gemma3.rope_theta, gemma3.rope_local_theta) == (1e6, 1e4)
    for spec in (gemma2, gemma3):
        assert (spec.norm, spec.mlp) == ("rmsnorm_1p", "geglu_tanh")
        assert spec.scale_embedding and spec.tie_embeddings
    assert make_spec(family="gemma2", **SIZES | {"num_layers": 3}).windows == (4096, 0, 4096)


@pytest.mark.parametrize(
    ("pattern", "layers", "shortest"),
    [
        ("LG", 5, "LG"),
        ("LGLG", 9, "LG"),
        ("LLLLLG", 5, "L"),
        ("LLLLLG", 6, "LLLLLG"),
        ("GGGLL", 5, "GGGLL"),
        ("GGGLL", 10**9, "GGGLL"),
        ("LGL", 3, "LG"),
        ("LGL", 4, "LGL"),
        ("GG", 1, "G"),
    ],
)
def test_a_pattern_of_windows_has_one_form(pattern: str, layers: int, shortest: str) -> None:
    assert shortest_pattern(pattern, layers) == shortest
    assert (
        make_spec(
            family="llama", window=4, window_pattern=pattern, **SIZES | {"num_layers": layers}
        ).window_pattern
        == shortest
    )


def test_defaults_leave_dropout_off() -> None:
    for family in FAMILIES:
        spec = make_spec(family=family, **SIZES)
        assert (spec.dropout, spec.attention_dropout) == (0.0, 0.0)


def test_a_spec_survives_json_values() -> None:
    scalings: list[RopeScaling] = [
        LinearScaling(factor=2.0),
        Llama3Scaling(factor=8.0, original_max_seq_len=16),
        YarnScaling(factor=8.0, original_max_seq_len=16, beta_fast=16.0),
    ]
    for scaling in scalings:
        spec = make_spec(family="gemma3", num_kv_heads=2, rope_scaling=scaling, **SIZES)
        values = spec.to_dict()
        assert isinstance(values["rope_scaling"], dict)
        assert make_spec(**json.loads(json.dumps(values))) == spec


def test_a_table_without_a_kind_is_of_llama_3() -> None:
    """As manifests written before there were others have it."""
    table = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    spec = make_spec(family="llama", rope_scaling=table | {"original_max_seq_len": 16}, **SIZES)
    assert spec.rope_scaling == Llama3Scaling(factor=8.0, original_max_seq_len=16)


def test_the_attention_factor_of_yarn() -> None:
    scaling = YarnScaling(factor=4.0, original_max_seq_len=16)
    assert scaling.gain == pytest.approx(1.1386294361)
    assert YarnScaling(factor=0.5, original_max_seq_len=16).gain == 1.0
    assert YarnScaling(factor=4.0, original_max_seq_len=16, attention_factor=1.5).gain == 1.5


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
        ({"norm": "batchnorm"}, ["model.norm", "'batchnorm'", "rmsnorm, rmsnorm_1p, layernorm"]),
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
        ({"rope_scaling": {"low_freq_factor": 1.0}}, ["rope_scaling.factor", "missing"]),
        ({"rope_scaling": {"kind": "ntk"}}, ["rope_scaling.kind", "'ntk'", "linear, llama3, yarn"]),
        (
            {"rope_scaling": {"kind": "linear", "factor": 2.0, "beta_fast": 3.0}},
            ["rope_scaling.beta_fast", "kind linear"],
        ),
        (
            {"rope_scaling": {"kind": "yarn", "factor": 2.0}},
            ["rope_scaling.original_max_seq_len", "missing", "kind yarn"],
        ),
        ({"rope_scaling": {"kind": "linear", "factor": 0}}, ["rope_scaling.factor", "above 0"]),
        ({"norm_place": "after"}, ["model.norm_place", "'after'", "family llama", "before"]),
        ({"qk_norm": "heads"}, ["model.qk_norm", "'heads'", "none, head, all"]),
        ({"window": -1}, ["model.window", "-1", "at least 0"]),
        ({"window_pattern": "LX"}, ["model.window_pattern", "'LX'", "L (local) and G (global)"]),
        ({"window_pattern": ""}, ["model.window_pattern", "''"]),
        ({"window_pattern": 3}, ["model.window_pattern", "3"]),
        ({"logit_softcap": -1.0}, ["model.logit_softcap", "-1.0", "at least 0"]),
        ({"scale_embedding": 1}, ["model.scale_embedding", "true, false"]),
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
        Llama3Scaling(factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0)
    with pytest.raises(ConfigError, match="beta_slow 32.0 must be below beta_fast 32.0"):
        YarnScaling(factor=8.0, original_max_seq_len=16, beta_slow=32.0)
    with pytest.raises(ConfigError, match="rope_scaling needs rotary positions"):
        make_spec(family="gpt2", rope_scaling=LinearScaling(factor=8.0), **SIZES)
    with pytest.raises(ConfigError, match="rope_local_theta needs rotary positions"):
        make_spec(family="gpt2", rope_local_theta=10.0, **SIZES)


def test_norms_over_all_heads_are_plain_ones() -> None:
    with pytest.raises(ConfigError, match="qk_norm all needs norm rmsnorm, not rmsnorm_1p"):
        make_spec(family="gemma2", qk_norm="all", **SIZES)


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
