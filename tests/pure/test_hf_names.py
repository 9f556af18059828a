"""config.json in and out, and the Hugging Face names of tensors, as data."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rankmesh.errors import CheckpointError, RankmeshError
from rankmesh.specs.families import FAMILIES
from rankmesh.specs.hf import same_for_hf, spec_from_hf, spec_to_hf
from rankmesh.specs.hf_dialects import DIALECTS
from rankmesh.specs.hf_tensors import bare_name, hf_sources, hf_tensors, is_ignored
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import parts
from rankmesh.specs.presets import names, preset
from rankmesh.specs.rope import LinearScaling, Llama3Scaling, YarnScaling

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 99,
}
GEMMA3: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("name", names())
def test_every_preset_goes_out_and_comes_back(name: str) -> None:
    spec = preset(name)
    assert spec_from_hf(spec_to_hf(spec)) == spec


def test_each_family_has_its_dialect() -> None:
    assert set(DIALECTS) == set(FAMILIES)


@pytest.mark.parametrize("name", [f"{family}-tiny" for family in FAMILIES])
def test_each_logical_tensor_lies_in_one_place(name: str) -> None:
    spec = preset(name, tie_embeddings=False)
    shapes = {part.name: part.shape for part in parts(spec)}
    tensors = {tensor.name: tensor for tensor in hf_tensors(spec)}
    held = [part for tensor in tensors.values() for part in tensor.parts]
    assert sorted(held) == sorted(shapes)
    sources = hf_sources(spec)
    assert set(sources) == set(shapes)
    total = sum(math.prod(tensor.shape) for tensor in tensors.values())
    assert total == sum(math.prod(shape) for shape in shapes.values())
    for logical, source in sources.items():
        tensor = tensors[source.name]
        rows = tensor.shape[::-1][0] if tensor.transpose else tensor.shape[0]
        assert source.offset + shapes[logical][0] <= rows


def test_gpt2_attention_is_one_transposed_tensor() -> None:
    spec = preset("gpt2-tiny")
    tensors = {tensor.name: tensor for tensor in hf_tensors(spec)}
    weight = tensors["transformer.h.1.attn.c_attn.weight"]
    assert weight.shape == (64, 192) and weight.transpose
    assert weight.parts == tuple(f"layers.1.attn.{name}.weight" for name in "qkv")
    assert tensors["transformer.h.1.attn.c_attn.bias"].shape == (192,)
    assert hf_sources(spec)["layers.1.attn.v.bias"].offset == 128
    assert "lm_head.weight" not in tensors


def test_names_of_base_models_and_of_buffers() -> None:
    spec = preset("gpt2-tiny")
    assert bare_name(spec, "transformer.h.0.ln_1.weight") == "h.0.ln_1.weight"
    assert is_ignored(spec, "h.0.attn.bias") and is_ignored(spec, "lm_head.weight")
    assert not is_ignored(spec, "h.0.attn.c_attn.bias")
    assert not is_ignored(preset("llama-tiny"), "lm_head.weight")


def test_both_ways_of_writing_rotary_options_are_read() -> None:
    """transformers 5 has `rope_parameters`; before, `rope_theta` and `rope_scaling`."""
    old = spec_from_hf({**LLAMA, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE})
    new = spec_from_hf({**LLAMA, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500000.0}})
    assert old == new
    assert old.rope_scaling == Llama3Scaling(factor=8.0, original_max_seq_len=8192)
    plain = spec_from_hf({**LLAMA, "rope_scaling": None, "rope_theta": 5.0})
    assert (plain.rope_theta, plain.rope_scaling) == (5.0, None)


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"type": "linear", "factor": 2.0}, LinearScaling(factor=2.0)),
        (YARN, YarnScaling(factor=4.0, original_max_seq_len=512)),
        ({**YARN, "factor": None}, YarnScaling(factor=4.0, original_max_seq_len=512)),
        (
            {**YARN, "beta_fast": 16, "attention_factor": 1.5},
            YarnScaling(factor=4.0, original_max_seq_len=512, beta_fast=16, attention_factor=1.5),
        ),
        (
            {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            YarnScaling(factor=4.0, original_max_seq_len=512, attention_factor=1.0),
        ),
    ],
)
def test_scalings_of_frequencies(rope: dict[str, Any], scaling: object) -> None:
    spec = spec_from_hf({**LLAMA, "rope_scaling": rope})
    assert spec.rope_scaling == scaling
    assert spec_from_hf(spec_to_hf(spec)) == spec


def test_gemma3_has_two_thetas() -> None:
    """Old keys and nested tables say the same; the scaling is of global layers alone."""
    linear = {"rope_type": "linear", "factor": 8.0}
    old = spec_from_hf({**GEMMA3, "rope_theta": 5e5, "rope_scaling": linear})
    nested = {
        "full_attention": {**linear, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert spec_from_hf({**GEMMA3, "rope_parameters": nested}) == old
    assert (old.rope_theta, old.rope_local_theta) == (5e5, 1e4)
    assert old.rope_scaling == LinearScaling(factor=8.0)


def test_windows_of_layers() -> None:
    """Every form in which they are written."""
    gemma = spec_from_hf(GEMMA3)
    assert (gemma.window, gemma.window_pattern) == (4096, "LLLLLG")
    assert gemma.windows == (4096,) * 5 + (0, 4096)
    assert spec_from_hf({**GEMMA3, "sliding_window_pattern": 3}).window_pattern == "LLG"
    types = ["full_attention"] * 6 + ["sliding_attention"]
    last = spec_from_hf({**GEMMA3, "sliding_window": 512, "layer_types": types})
    assert last.windows == (0,) * 6 + (512,)
    assert spec_from_hf(QWEN3).windows == (0, 0)
    qwen = {**QWEN3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert spec_from_hf(qwen).windows == (0, 8)
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert spec_from_hf(mistral).windows == (4096, 4096)
    assert spec_from_hf({**mistral, "sliding_window": None}).windows == (0, 0)
    assert spec_from_hf({**PHI3, "sliding_window": 2047}).windows == (2047, 2047)


def test_the_same_model_to_hugging_face() -> None:
    """How it is trained makes no difference, what its weights mean does."""
    spec = preset("llama-tiny", dropout=0.1, scale_residual_init=True)
    assert same_for_hf(spec, spec_to_hf(preset("llama-tiny")))
    assert not same_for_hf(spec, spec_to_hf(preset("llama-tiny", norm_eps=1e-6)))
    assert not same_for_hf(spec, {"model_type": "mamba"})
    gpt2 = preset("gpt2-tiny", dropout=0.1)
    assert not same_for_hf(gpt2, spec_to_hf(preset("gpt2-tiny")))


def test_code_that_repeats_a_known_class_changes_nothing() -> None:
    """Phi-3's folders bring a copy of the class; any other class is refused below."""
    own = {"AutoConfig": "x.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    assert spec_from_hf({**PHI3, "auto_map": own}) == spec_from_hf(PHI3)


def test_absent_keys_have_the_defaults_of_hugging_face() -> None:
    spec = spec_from_hf(LLAMA)
    assert (spec.norm_eps, spec.max_seq_len, spec.rope_theta) == (1e-6, 2048, 10000.0)
    gpt2 = spec_from_hf(GPT2)
    assert (gpt2.ffn_size, gpt2.max_seq_len, gpt2.dropout) == (256, 1024, 0.1)
    assert gpt2.tie_embeddings and gpt2.attention_dropout == 0.1


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (
            LLAMA,
            {"model_type": "mamba"},
            ["model_type", "'mamba'", "llama, gpt2, mistral, qwen2", "gemma3_text"],
        ),
        (LLAMA, {"model_type": None}, ["model_type", "None"]),
        (LLAMA, {"architectures": ["LlamaModel"]}, ["architectures", "LlamaForCausalLM"]),
        (LLAMA, {"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        (LLAMA, {"quantization_config": {"bits": 4}}, ["quantization_config"]),
        (LLAMA, {"auto_map": {"AutoModel": "x.Y"}}, ["auto_map"]),
        (LLAMA, {"auto_map": {"AutoModelForCausalLM": "x.OtherForCausalLM"}}, ["auto_map"]),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_type", "'dynamic'"]),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, ["rope_type linear", "factor", "missing"]),
        (LLAMA, {"rope_scaling": {**YARN, "truncate": False}}, ["truncate of yarn", "False"]),
        (LLAMA, {"rope_parameters": {"full_attention": {}}}, ["rope_parameters", "full_attention"]),
        (PHI3, {"rope_scaling": {"type": "longrope"}}, ["rope_type", "'longrope'", "default"]),
        (PHI3, {"rope_scaling": YARN}, ["rope_type", "'yarn'", "default"]),
        (PHI3, {"resid_pdrop": 0.1}, ["embd_pdrop", "0.0", "resid_pdrop"]),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        (GEMMA3, {"use_bidirectional_attention": True}, ["use_bidirectional_attention", "True"]),
        (GEMMA3, {"hidden_activation": "gelu"}, ["hidden_activation", "'gelu'"]),
        (GEMMA3, {"layer_types": ["chunked_attention"] * 7}, ["layer_types", "chunked_attention"]),
        (GEMMA3, {"layer_types": ["full_attention"]}, ["layer_types", "list of 1", "list of 7"]),
        (QWEN3, {"layer_types": ["chunked_attention"] * 2}, ["layer_types", "chunked_attention"]),
        (QWEN3, {"layer_types": ["full_attention"]}, ["layer_types", "list of 1", "list of 2"]),
        (
            GEMMA3,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            ["rope_type of sliding_attention", "'linear'"],
        ),
        (GEMMA3, {"model_type": "gemma3"}, ["model_type", "'gemma3'", "gemma3_text"]),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, ["llama3", "factor", "missing"]),
        (LLAMA, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        (LLAMA, {"num_key_value_heads": 3}, ["num_kv_heads 3", "num_heads 4"]),
        (LLAMA, {"vocab_size": "many"}, ["vocab_size", "'many'"]),
        (GPT2, {"architectures": ["GPT2DoubleHeadsModel"]}, ["architectures"]),
        (GPT2, {"activation_function": "relu"}, ["activation_function", "'relu'", "gelu_new"]),
        (GPT2, {"scale_attn_weights": False}, ["scale_attn_weights", "False"]),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
        (GPT2, {"add_cross_attention": True}, ["add_cross_attention"]),
        (GPT2, {"embd_pdrop": 0.2}, ["embd_pdrop", "0.2", "resid_pdrop"]),
    ],
)
def test_what_a_spec_cannot_express_is_refused_by_name(
    base: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(RankmeshError) as caught:
        spec_from_hf({**base, **changes})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_tensor_without_a_place_is_named() -> None:
    """The name map never drops a parameter silently."""
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn_post_norm\.weight has no place"):
        hf_tensors(_post_normed())


def _post_normed() -> ModelSpec:
    """A llama with norms that its files have no names for; the spec's own check is passed by."""
    spec = preset("llama-tiny")
    object.__setattr__(spec, "norm_place", "around")
    return spec


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (preset("llama-tiny", qkv_bias=True), ["model.qkv_bias True", "LlamaForCausalLM"]),
        (preset("llama-tiny", num_heads=6, head_dim=8), ["model.num_heads 6", "hidden_size 64"]),
        (preset("gpt2-tiny", qkv_bias=False), ["model.qkv_bias", "GPT2LMHeadModel", "bias"]),
        (preset("gpt2-tiny", mlp_bias=False), ["model.mlp_bias"]),
        (preset("gpt2-tiny", num_kv_heads=2), ["model.num_kv_heads 2", "read as 4"]),
        (preset("gpt2-tiny", head_dim=8), ["model.head_dim 8", "read as 16"]),
        (preset("gpt2-tiny", window=8), ["model.window (8, 8)", "read as (0, 0)"]),
        (preset("llama-tiny", qk_norm="head"), ["model.qk_norm 'head'", "LlamaForCausalLM"]),
        (preset("llama-tiny", window=8), ["model.window"]),
        (preset("llama-tiny", logit_softcap=30.0), ["model.logit_softcap 30.0"]),
        (preset("llama-tiny", scale_embedding=True), ["model.scale_embedding True"]),
        (preset("llama-tiny", rope_local_theta=1e4), ["model.rope_local_theta 10000.0"]),
        (preset("llama-tiny", query_scalar=8), ["model.query_scalar 8"]),
        (
            preset("mistral-tiny", window_pattern="LG"),
            ["model.window_pattern 'LG'", "MistralForCausalLM", "same window"],
        ),
        (preset("qwen2-tiny", out_bias=True), ["model.out_bias True", "Qwen2ForCausalLM"]),
        (preset("qwen3-tiny", out_bias=True), ["model.out_bias True", "Qwen3ForCausalLM"]),
        (preset("gemma2-tiny", query_scalar=6.5), ["model.query_scalar 6.5", "whole number"]),
        (preset("gemma3-tiny", attention_softcap=50.0), ["model.attention_softcap 50.0"]),
        (preset("olmo2-tiny", qk_norm="head"), ["model.qk_norm 'head'", "Olmo2ForCausalLM"]),
        (
            preset("phi3-tiny", rope_scaling={"kind": "linear", "factor": 2.0}),
            ["Phi3ForCausalLM", "rope_type is 'linear'"],
        ),
    ],
)
def test_what_hugging_face_cannot_express_is_refused_by_name(
    spec: ModelSpec, words: list[str]
) -> None:
    """Field report H06: the refusal comes before anything is written and names the option."""
    with pytest.raises(CheckpointError) as caught:
        spec_to_hf(spec)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
