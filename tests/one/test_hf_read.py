"""Hugging Face folders: only the slice that is asked for is read, and what is wrong is named."""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rankmesh.checkpoint.hf_read import read_hf
from rankmesh.checkpoint.source import open_weights
from rankmesh.errors import CheckpointError
from rankmesh.specs.hf import spec_to_hf
from rankmesh.specs.hf_tensors import hf_tensors
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import param_table, parts
from rankmesh.specs.presets import preset
from rankmesh.topology.plan import ParallelPlan

LLAMA = preset("llama-tiny", vocab_size=61)
GPT2 = preset("gpt2-tiny", vocab_size=61)


def logical_tensors(spec: ModelSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {part.name: torch.randn(part.shape, generator=generator) for part in parts(spec)}


def stored_tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """The same under Hugging Face's names and layouts."""
    tensors = logical_tensors(spec)
    made = {}
    for tensor in hf_tensors(spec):
        stacked = torch.cat([tensors[name] for name in tensor.parts])
        made[tensor.name] = (stacked.t() if tensor.transpose else stacked).contiguous()
        assert tuple(made[tensor.name].shape) == tensor.shape
    return made


def save(folder: Path, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(spec_to_hf(spec)))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_rank_reads_its_own_slices(spec: ModelSpec, tp: int, tmp_path: Path) -> None:
    tensors = logical_tensors(spec)
    source = read_hf(save(tmp_path / "hf", spec, stored_tensors(spec)))
    assert (source.spec, source.step, source.tokenizer) == (spec, 0, None)
    for param in param_table(spec, ParallelPlan(tp=tp)):
        for rank in range(tp):
            slices = param.slices({"tp": rank})
            read = source.slice(param.name, slices)
            assert read.is_contiguous()
            assert torch.equal(read, tensors[param.name][slices]), param.name


def test_only_the_bytes_of_the_slice_are_read(tmp_path: Path) -> None:
    """One layer of 405B's size in a sparse file of 15 GB: a slice costs its own memory."""
    spec = preset("llama-3.1-405b", num_layers=1)
    header: dict[str, object] = {}
    end = 0
    for tensor in hf_tensors(spec):
        start, end = end, end + 2 * torch.Size(tensor.shape).numel()
        header[tensor.name] = {
            "dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, end]
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / "config.json").write_text(json.dumps(spec_to_hf(spec)))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source = read_hf(tmp_path)
    rows = spec.vocab_size // 128
    part = source.slice("embed.weight", (slice(5 * rows, 6 * rows), slice(0, 16384)))
    assert part.shape == (rows, 16384)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    # Twice over: pages of the mapped file count, too, until the system takes them back.
    assert grown < 2 * part.nbytes / 1024 + 16 * 1024, f"{grown} KiB"


def test_names_without_the_prefix_and_stored_buffers_are_understood(tmp_path: Path) -> None:
    """GPT-2 as its authors published it: no `transformer.`, causal masks among the weights."""
    stored = {
        name.removeprefix("transformer."): tensor for name, tensor in stored_tensors(GPT2).items()
    }
    stored["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    stored["lm_head.weight"] = stored["wte.weight"].clone()
    source = read_hf(save(tmp_path / "hf", GPT2, stored))
    value = source.slice("layers.1.attn.v.weight", (slice(0, 64), slice(0, 64)))
    assert torch.equal(value, logical_tensors(GPT2)["layers.1.attn.v.weight"])


def test_a_tokenizer_beside_the_weights_is_found(tmp_path: Path) -> None:
    folder = save(tmp_path / "hf", LLAMA, stored_tensors(LLAMA))
    (folder / "tokenizer.json").write_text("{}")
    assert open_weights(folder).tokenizer == str(folder / "tokenizer.json")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    stored = stored_tensors(LLAMA)
    stored.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        read_hf(save(tmp_path / "hf", LLAMA, stored))


def test_a_tensor_that_the_config_does_not_know_is_named(tmp_path: Path) -> None:
    """A bias in the file and none in the config would silently be left out."""
    stored = stored_tensors(LLAMA)
    stored["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    with pytest.raises(CheckpointError, match=r"q_proj\.bias has no place"):
        read_hf(save(tmp_path / "hf", LLAMA, stored))


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    stored = stored_tensors(LLAMA)
    stored.pop("lm_head.weight")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        read_hf(save(tmp_path / "hf", LLAMA, stored))


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    stored = stored_tensors(LLAMA)
    stored["model.norm.weight"] = torch.zeros(65)
    source = read_hf(save(tmp_path / "hf", LLAMA, stored))
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight has shape \(65,\), .* needs \(64,\)"
    ):
        source.slice("norm.weight", (slice(0, 64),))
    with pytest.raises(CheckpointError, match="does not hold"):
        source.slice("norm.weight", (slice(0, 65),))
    with pytest.raises(CheckpointError, match="no tensor nose"):
        source.slice("nose", (slice(0, 1),))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(spec_to_hf(LLAMA)))
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        read_hf(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        read_hf(tmp_path)


def test_a_folder_or_config_that_is_not_there_or_not_readable(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="file is missing"):
        read_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_hf(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(CheckpointError, match=f"{tmp_path}: config.json: model_type is 'mamba'"):
        read_hf(tmp_path)
    for wrong in ({"auto_map": "x"}, {"rope_scaling": "x"}, {"rope_scaling": {"rope_type": []}}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | wrong))
        with pytest.raises(CheckpointError, match=f"{tmp_path}: "):
            read_hf(tmp_path)


def test_a_bad_index_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "hf", LLAMA, stored_tensors(LLAMA))
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="no weight_map"):
        read_hf(folder)
    names = {tensor.name: "../model.safetensors" for tensor in hf_tensors(LLAMA)}
    index.write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match="not the name of a file in this folder"):
        read_hf(folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "gone.safetensors")}))
    source = read_hf(folder)
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: file is missing"):
        source.slice("norm.weight", (slice(0, 64),))


def test_a_broken_config_is_named_once(tmp_path: Path) -> None:
    """Not the folder, and then the file in it."""
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError) as caught:
        read_hf(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: cannot be read as JSON")
