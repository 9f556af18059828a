"""`rankmesh convert`: a folder that goes into our format and out again is the same, bit for bit."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from rankmesh.checkpoint.hf_read import read_hf
from rankmesh.checkpoint.source import open_weights
from rankmesh.checkpoint.tensorfile import TensorFiles
from rankmesh.checkpoint.weights import LocalSlice, write_weights
from rankmesh.cli.main import main
from rankmesh.nn import Layout
from rankmesh.specs.families import FAMILIES
from rankmesh.specs.placement import parts
from rankmesh.specs.presets import preset
from rankmesh.train.generate import load_model
from tests.one.hf_models import MAKERS, randomised

INDEX = "model.safetensors.index.json"


def hf_folder(path: Path, case: str, dtype: torch.dtype = torch.float32, **save: Any) -> Path:
    """A folder as `transformers` writes it, with tokenizer, generation config and licence."""
    torch.manual_seed(7)
    model = randomised(MAKERS[case]()).to(dtype)
    model.generation_config = GenerationConfig(temperature=0.7, do_sample=True, max_new_tokens=9)
    model.save_pretrained(path, **save)
    words = {word: number for number, word in enumerate(["<s>", "</s>", "a", "b", "c"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{{ messages }}",
    ).save_pretrained(path)
    (path / "LICENSE.txt").write_text("free\n")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by name; no folder may be among them."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def convert(*words: object) -> None:
    assert main(["convert", *map(str, words)]) == 0


def there_and_back(tmp_path: Path, first: Path) -> Path:
    convert(first, tmp_path / "ours", "--to", "rankmesh")
    shutil.move(first, tmp_path / "away")  # nothing may still be read from there
    convert(tmp_path / "ours", tmp_path / "again", "--to", "hf")
    return tmp_path / "again"


@pytest.mark.parametrize("case", MAKERS)
def test_a_folder_comes_back_byte_for_byte(case: str, tmp_path: Path) -> None:
    """Every file: weights in several shards, index, config, tokenizer, generation config."""
    first = hf_folder(tmp_path / "hf", case, torch.bfloat16, max_shard_size="30KB")
    before = contents(first)
    assert INDEX in before and {"generation_config.json", "tokenizer.json"} <= set(before)
    assert contents(there_and_back(tmp_path, first)) == before


@pytest.mark.parametrize("case", ["gpt2", "phi3", "gemma3"])
def test_a_single_file_comes_back_byte_for_byte(case: str, tmp_path: Path) -> None:
    first = hf_folder(tmp_path / "hf", case)
    before = contents(first)
    assert "model.safetensors" in before
    assert contents(there_and_back(tmp_path, first)) == before


def test_a_tied_head_that_was_stored_all_the_same_comes_back(tmp_path: Path) -> None:
    """Older writers store both; field report H02."""
    first = hf_folder(tmp_path / "hf", "llama one KV head, tied")
    tensors = load_file(first / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, first / "model.safetensors", {"format": "pt"})
    before = contents(first)
    assert contents(there_and_back(tmp_path, first)) == before


def test_a_head_that_is_tied_in_name_only_is_refused(tmp_path: Path, capsys: Any) -> None:
    """Field report H02: the config says tied, the tensors are not."""
    first = hf_folder(tmp_path / "hf", "llama one KV head, tied")
    tensors = load_file(first / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 0.1
    save_file(tensors, first / "model.safetensors", {"format": "pt"})
    assert main(["convert", str(first), str(tmp_path / "ours"), "--to", "rankmesh"]) == 2
    assert "lm_head.weight differs from the embedding" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_made_here_are_read_by_transformers(family: str, tmp_path: Path) -> None:
    """Field report H01: logits of what we write equal ours."""
    spec = preset(f"{family}-tiny", vocab_size=67, init_std=0.15)
    values = random_values(spec)
    write_weights(tmp_path / "ours", values, spec=spec, step=3)
    convert(tmp_path / "ours", tmp_path / "hf", "--to", "hf", "--shard-gb", "0.0003")
    assert (tmp_path / "hf" / INDEX).is_file()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    assert theirs.config.eos_token_id is None
    ours = read_hf(tmp_path / "hf")
    for held in values:
        assert isinstance(held.tensor, Tensor)
        assert torch.equal(ours.slice(held.name, held.slices), held.tensor), held.name
    tokens = torch.randint(0, 67, (2, 100))
    from_ours = logits(tmp_path / "ours", tokens)
    assert torch.allclose(theirs(tokens).logits, from_ours, rtol=1e-4, atol=1e-4)


def random_values(spec: Any) -> list[LocalSlice]:
    generator = torch.Generator().manual_seed(1)
    return [
        LocalSlice(
            part.name,
            part.shape,
            tuple(slice(0, size) for size in part.shape),
            torch.randn(part.shape, generator=generator) * 0.15,
        )
        for part in parts(spec)
    ]


def logits(folder: Path, tokens: Tensor) -> Tensor:
    model = load_model(open_weights(folder))
    hidden, _ = model(tokens.flatten(), Layout.plain(*tokens.shape))
    return model.logits(hidden).view(*tokens.shape, -1)


def test_token_ids_come_from_the_tokenizer_that_came_along(tmp_path: Path) -> None:
    """Without ids a class of theirs has its own, which would end texts at the wrong token."""
    hf = hf_folder(tmp_path / "hf", "llama grouped queries")
    spec = read_hf(hf).spec
    write_weights(tmp_path / "ours", random_values(spec), spec=spec, step=3, tokenizer=str(hf))
    convert(tmp_path / "ours", tmp_path / "out", "--to", "hf")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, 1, None)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        hf / "tokenizer.json"
    ).read_bytes()


def test_trained_weights_take_the_files_of_the_folder_they_came_from(tmp_path: Path) -> None:
    """--like: config and the rest as in that folder, also where the weights' dtype is another."""
    hf = hf_folder(tmp_path / "hf", "qwen3", torch.bfloat16, max_shard_size="30KB")
    spec = read_hf(hf).spec
    write_weights(tmp_path / "ours", random_values(spec), spec=spec, step=3)
    convert(tmp_path / "ours", tmp_path / "same", "--to", "hf", "--like", hf, "--dtype", "bf16")
    same, before = contents(tmp_path / "same"), contents(hf)
    assert set(same) == set(before)
    assert {name for name in before if same[name] != before[name]} == {
        name for name in before if name.endswith(".safetensors")
    }
    convert(tmp_path / "ours", tmp_path / "wide", "--to", "hf", "--like", hf)
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert config == json.loads((hf / "config.json").read_text()) | {"dtype": "float32"}
    assert (
        load_file(tmp_path / "wide" / "model.safetensors")["model.norm.weight"].dtype
        == torch.float32
    )


def test_what_hugging_face_cannot_express_is_refused_before_a_file_is_written(
    tmp_path: Path, capsys: Any
) -> None:
    """Field report H06: the option is named."""
    spec = preset("llama-tiny", logit_softcap=30.0)
    write_weights(tmp_path / "ours", random_values(spec), spec=spec, step=3)
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "hf"), "--to", "hf"]) == 2
    assert (
        "model.logit_softcap 30.0 cannot be written as LlamaForCausalLM" in capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "mamba2"}')
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "ours"), "--to", "rankmesh"]) == 2
    error = capsys.readouterr().err
    assert "model_type is 'mamba2'" in error and "gemma3_text" in error
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "rankmesh", "--shard-gb", "1"], "--shard-gb 1.0: only for --to hf"),
        (["--to", "rankmesh", "--like", "x"], "--like x: only for --to hf"),
        (["--to", "hf", "--shard-gb", "0"], "--shard-gb is 0"),
        (["--to", "hf", "--like", "."], "no config.json, so it is no Hugging Face folder"),
    ],
)
def test_options_in_error(
    words: list[str], message: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    first = hf_folder(tmp_path / "hf", "llama grouped queries")
    monkeypatch.chdir(tmp_path)
    assert main(["convert", str(first), str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_target_that_exists_is_left_alone(tmp_path: Path, capsys: Any) -> None:
    first = hf_folder(tmp_path / "hf", "gpt2")
    (tmp_path / "out").mkdir()
    for form in ("hf", "rankmesh"):
        assert main(["convert", str(first), str(tmp_path / "out"), "--to", form]) == 2
        assert "exists already" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_the_json_of_a_conversion(tmp_path: Path, capsys: Any) -> None:
    first = hf_folder(tmp_path / "hf", "gpt2")
    convert(first, tmp_path / "half", "--to", "hf", "--dtype", "fp16", "--json")
    facts = json.loads(capsys.readouterr().out)
    assert facts["format"] == "hf" and facts["files"] == ["model.safetensors"]
    assert facts["bytes"] == 2 * facts["parameters"]
    with safe_open(tmp_path / "half" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert all(file.get_slice(name).get_dtype() == "F16" for name in file.keys())


def test_a_model_larger_than_memory_converts(tmp_path: Path, monkeypatch: Any) -> None:
    """Tensor by tensor, each way: what has been read is let go before the next is."""
    spec = preset("llama-tiny", num_layers=12, hidden_size=128, num_heads=4, ffn_size=512)
    values = random_values(spec)
    sizes = [held.tensor.nbytes for held in values if isinstance(held.tensor, Tensor)]
    write_weights(tmp_path / "ours", values, spec=spec, step=0)
    alive = {"now": 0, "most": 0, "all": 0}

    def let_go(size: int) -> None:
        alive["now"] -= size

    def counted(read: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            tensor: Tensor = read(*args, **kwargs)
            alive["now"] += tensor.nbytes
            alive["all"] += tensor.nbytes
            alive["most"] = max(alive["most"], alive["now"])
            weakref.finalize(tensor, let_go, tensor.nbytes)
            return tensor

        return wrapper

    for name in ("read", "piece"):
        monkeypatch.setattr(TensorFiles, name, counted(getattr(TensorFiles, name)))
    convert(tmp_path / "ours", tmp_path / "hf", "--to", "hf")
    convert(tmp_path / "hf", tmp_path / "again", "--to", "rankmesh")
    assert alive["all"] > 2 * sum(sizes) > 20 * max(sizes)
    assert alive["most"] <= 2 * max(sizes)


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, capsys: Any) -> None:
    """A shard that is missing comes to light while the target is written."""
    first = hf_folder(tmp_path / "hf", "llama grouped queries", max_shard_size="30KB")
    sorted(first.glob("*.safetensors"))[-1].unlink()
    assert main(["convert", str(first), str(tmp_path / "ours"), "--to", "rankmesh"]) == 2
    assert ".safetensors: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("to", ["rankmesh", "hf"])
def test_a_target_inside_the_source_is_refused(to: str, tmp_path: Path, capsys: Any) -> None:
    """A checkpoint is never written into."""
    first = hf_folder(tmp_path / "hf", "llama grouped queries")
    before = contents(first)
    assert main(["convert", str(first), str(first / "sub"), "--to", to]) == 2
    assert f"{first / 'sub'}: lies inside the source {first}" in capsys.readouterr().err
    assert contents(first) == before


def test_marks_beyond_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    """Of a folder of another model: an id without a row is no id."""
    like = hf_folder(tmp_path / "hf", "llama grouped queries")
    edited = json.loads((like / "config.json").read_text())
    edited |= {"bos_token_id": 1, "eos_token_id": [2, 67, 128001], "pad_token_id": 128002}
    (like / "config.json").write_text(json.dumps(edited))
    spec = preset("llama-tiny", vocab_size=67)
    write_weights(tmp_path / "ours", random_values(spec), spec=spec, step=1)
    convert(tmp_path / "ours", tmp_path / "out", "--to", "hf", "--like", like)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    found = {key: written[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    assert found == {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": None}
