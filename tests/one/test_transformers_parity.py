"""Logits and every gradient against `transformers`, on small random models of every family.

Hugging Face's model is saved as safetensors and read through `read_hf`, so the name maps, the
transposes and the slices of fused tensors are proven with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rankmesh.checkpoint.hf_read import read_hf
from rankmesh.nn import Layout, LossOptions, Transformer
from rankmesh.specs.families import FAMILIES
from rankmesh.specs.hf import spec_from_hf, spec_to_hf
from rankmesh.specs.hf_dialects import DIALECTS
from rankmesh.specs.hf_tensors import hf_sources
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import num_params, parts
from rankmesh.specs.presets import names, preset
from rankmesh.train.generate import load_model
from tests.one.hf_models import MAKERS, VOCAB, randomised

TOLERANCE = 1e-4
BATCH, LENGTH = 3, 24


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


def test_every_family_is_compared() -> None:
    assert {name.split()[0] for name in MAKERS} == set(FAMILIES)


@pytest.mark.parametrize("case", MAKERS)
def test_logits_and_gradients_equal_transformers(case: str, tmp_path: Path) -> None:
    """Field report H01: logits of a folder read equal Hugging Face's; weights are bit-equal."""
    torch.manual_seed(7)
    theirs = randomised(MAKERS[case]())
    theirs.save_pretrained(tmp_path)
    source = read_hf(tmp_path)
    ours = load_model(source)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH))
    labels = torch.randint(0, VOCAB, (BATCH, LENGTH))

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


@pytest.mark.parametrize("case", MAKERS)
def test_a_config_written_by_us_means_the_same_to_transformers(case: str, tmp_path: Path) -> None:
    """spec -> config.json -> their config -> their config.json -> spec."""
    spec = spec_from_hf(MAKERS[case]().config.to_dict())
    config = spec_to_hf(spec)
    theirs = AutoConfig.for_model(**config)
    assert spec_from_hf(theirs.to_dict()) == spec
    assert [theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id] == [None] * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_mean_what_they_mean_to_transformers(family: str) -> None:
    """A config.json of nothing but its kind is the model that their classes make of it."""
    kind = DIALECTS[family].model_type
    theirs = AutoConfig.for_model(kind).to_dict()
    assert spec_from_hf({"model_type": kind}) == spec_from_hf(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_presets_have_the_parameters_of_the_models_that_transformers_builds(name: str) -> None:
    """Counted on the meta device from the config that we write."""
    spec = preset(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec_to_hf(spec)))
    assert sum(p.numel() for p in model.parameters()) == num_params(spec)


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
