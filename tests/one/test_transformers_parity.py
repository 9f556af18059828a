"""Logits and every gradient against `transformers`, on small random models of both families.

Hugging Face's model is saved as safetensors and read through `read_hf`, so the name maps, the
transposes and the slices of fused tensors are proven with it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rankmesh.checkpoint.hf_read import read_hf
from rankmesh.nn import Layout, LossOptions, Transformer
from rankmesh.specs.hf import hf_sources, spec_to_hf
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import parts
from rankmesh.train.generate import load_model

TOLERANCE = 1e-4
BATCH, LENGTH = 3, 24
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that the 24 positions see all three ranges of frequencies.
    "original_max_position_embeddings": 16,
    "rope_theta": 1000.0,
}
LLAMA: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 101,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
GPT2: dict[str, Any] = {
    "vocab_size": 67,
    "n_embd": 48,
    "n_inner": 101,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 64,
    "initializer_range": 0.15,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def llama(**changes: Any) -> Any:
    config: Any = LlamaConfig
    return LlamaForCausalLM(config(**{**LLAMA, **changes}, attn_implementation="eager"))


def gpt2(**changes: Any) -> Any:
    config: Any = GPT2Config
    return GPT2LMHeadModel(config(**{**GPT2, **changes}, attn_implementation="eager"))


MAKERS: dict[str, Callable[[], Any]] = {
    "llama grouped queries": llama,
    "llama one KV head, tied": lambda: llama(num_key_value_heads=1, tie_word_embeddings=True),
    "llama full heads, own head_dim": lambda: llama(num_key_value_heads=6, head_dim=12),
    "llama 3 frequencies": lambda: llama(rope_parameters=LLAMA3_ROPE),
    "llama biases, another eps": lambda: llama(
        attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3
    ),
    "gpt2": gpt2,
    "gpt2 untied, exact gelu": lambda: gpt2(tie_word_embeddings=False, activation_function="gelu"),
}


def randomised(model: Any) -> Any:
    """Biases and norms too are random: zeros and ones would hide a swapped pair."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


def logical(tensors: dict[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Hugging Face tensors under logical names, by the name map and nothing else."""
    named = {}
    for part in parts(spec):
        source = hf_sources(spec)[part.name]
        whole = tensors[source.name].t() if source.transpose else tensors[source.name]
        named[part.name] = whole[source.offset : source.offset + part.shape[0]]
    return named


def is_zero(name: str) -> bool:
    """Gradients that vanish in exact arithmetic: softmax cancels what all keys have in common."""
    return name.startswith("gpt2") and name.endswith("attn.k.bias")


def close(ours: Tensor, theirs: Tensor, name: str) -> None:
    difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    if is_zero(name):
        assert max(difference, largest) <= 1e-5, f"{name}: {largest}, difference {difference}"
        return
    assert largest > 1e-3, f"{name}: the reference is zero"
    assert difference <= TOLERANCE * largest, f"{name}: {difference} of {largest}"


def backward(model: Transformer, tokens: Tensor, labels: Tensor) -> Tensor:
    """Sum of token losses, gradients left in the parameters."""
    layout = Layout.plain(BATCH, LENGTH)
    hidden, _ = model(tokens.flatten(), layout)
    loss = model.loss(hidden, labels.flatten(), LossOptions())
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("case", sorted(MAKERS))
def test_logits_and_gradients_equal_transformers(case: str, tmp_path: Path) -> None:
    """Field report H01: logits of a folder read equal Hugging Face's; weights are bit-equal."""
    torch.manual_seed(7)
    theirs = randomised(MAKERS[case]())
    theirs.save_pretrained(tmp_path)
    source = read_hf(tmp_path)
    ours = load_model(source)
    tokens = torch.randint(0, 67, (BATCH, LENGTH))
    labels = torch.randint(0, 67, (BATCH, LENGTH))

    output = theirs(input_ids=tokens, use_cache=False)
    hidden, _ = ours(tokens.flatten(), Layout.plain(BATCH, LENGTH))
    close(ours.logits(hidden).view_as(output.logits), output.logits, "logits")

    loss = nn.functional.cross_entropy(
        output.logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    loss.backward()
    close(backward(ours, tokens, labels), loss.detach(), "loss")
    weights = logical(dict(theirs.named_parameters()), source.spec)
    grads = logical(
        {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}, source.spec
    )
    seen = dict(ours.named_parameters())
    assert set(seen) == set(grads)
    for name, parameter in seen.items():
        assert torch.equal(parameter, weights[name]), name
        assert parameter.grad is not None
        close(parameter.grad, grads[name], f"{source.spec.family} {name}")


@pytest.mark.parametrize("case", sorted(MAKERS))
def test_a_config_written_by_us_means_the_same_to_transformers(case: str, tmp_path: Path) -> None:
    """spec -> config.json -> their config -> their config.json -> spec."""
    MAKERS[case]().save_pretrained(tmp_path)
    spec = read_hf(tmp_path).spec
    kind: Any = LlamaConfig if spec.family == "llama" else GPT2Config
    kind(**spec_to_hf(spec)).save_pretrained(tmp_path / "again")
    (tmp_path / "again" / "model.safetensors").write_bytes(
        (tmp_path / "model.safetensors").read_bytes()
    )
    assert read_hf(tmp_path / "again").spec == spec


def test_a_sharded_folder_reads_the_same(tmp_path: Path) -> None:
    """Several files under an index, as large models are published."""
    torch.manual_seed(7)
    model = randomised(MAKERS["llama grouped queries"]())
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = read_hf(tmp_path / "one"), read_hf(tmp_path / "many")
    for part in parts(one.spec):
        some = tuple(slice(size // 3, size) for size in part.shape)
        assert torch.equal(one.slice(part.name, some), many.slice(part.name, some))
