"""config.json in and out, and the Hugging Face names of tensors, as data."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rankmesh.errors import CheckpointError, RankmeshError
from rankmesh.specs.hf import (
    bare_name,
    hf_sources,
    hf_tensors,
    is_ignored,
    spec_from_hf,
    spec_to_hf,
)
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import parts
from rankmesh.specs.presets import names, preset

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


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny", "llama-3.2-1b"])
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
    assert old.rope_scaling is not None and old.rope_scaling.original_max_seq_len == 8192
    plain = spec_from_hf({**LLAMA, "rope_scaling": None, "rope_theta": 5.0})
    assert (plain.rope_theta, plain.rope_scaling) == (5.0, None)


def test_absent_keys_have_the_defaults_of_hugging_face() -> None:
    spec = spec_from_hf(LLAMA)
    assert (spec.norm_eps, spec.max_seq_len, spec.rope_theta) == (1e-6, 2048, 10000.0)
    gpt2 = spec_from_hf(GPT2)
    assert (gpt2.ffn_size, gpt2.max_seq_len, gpt2.dropout) == (256, 1024, 0.1)
    assert gpt2.tie_embeddings and gpt2.attention_dropout == 0.1


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (LLAMA, {"model_type": "mamba"}, ["model_type", "'mamba'", "llama, gpt2"]),
        (LLAMA, {"model_type": None}, ["model_type", "None"]),
        (LLAMA, {"architectures": ["LlamaModel"]}, ["architectures", "LlamaForCausalLM"]),
        (LLAMA, {"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        (LLAMA, {"quantization_config": {"bits": 4}}, ["quantization_config"]),
        (LLAMA, {"auto_map": {"AutoModel": "x.Y"}}, ["auto_map"]),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_type", "'linear'"]),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn"}}, ["rope_type", "'yarn'", "llama3"]),
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


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (preset("llama-tiny", qkv_bias=True), ["model.out_bias False", "LlamaForCausalLM"]),
        (preset("llama-tiny", num_heads=6, head_dim=8), ["model.num_heads 6", "hidden_size 64"]),
        (preset("gpt2-tiny", qkv_bias=False), ["model.qkv_bias", "GPT2LMHeadModel", "bias"]),
        (preset("gpt2-tiny", mlp_bias=False), ["model.mlp_bias"]),
        (preset("gpt2-tiny", num_kv_heads=2), ["model.num_kv_heads 2", "num_heads 4"]),
        (preset("gpt2-tiny", head_dim=8), ["model.head_dim 8", "hidden_size 64"]),
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
