"""Ids mean what one tokenizer says: token files, config and weights that disagree are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rankmesh.cli.main import main
from rankmesh.data.tokenizer import train_bpe
from rankmesh.errors import DataError
from rankmesh.train.build import prepare_job
from tests import runs

TEXT = "A mesh of ranks holds one model between them, in fp64 or less. " * 9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tokenizers, `one` at two places, and a token file of each: plain, one, twin, other."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="ascii")
    for name, text in (("one", TEXT), ("other", TEXT[::-1])):
        (tmp_path / name).mkdir()
        train_bpe([text], 280, tmp_path / name / "tokenizer.json")
    (tmp_path / "twin.json").write_bytes((tmp_path / "one" / "tokenizer.json").read_bytes())
    spec = {"plain": "bytes", "twin": str(tmp_path / "twin.json")}
    for name in ("plain", "one", "twin", "other"):
        words = [str(tmp_path / "text.txt"), "--tokenizer", spec.get(name, str(tmp_path / name))]
        assert main(["prepare", *words, "--out", str(tmp_path / "data" / name)]) == 0
    runs.write_config(tmp_path)
    return tmp_path


def given(folder: Path, *more: str, **sets: Sequence[str]) -> list[str]:
    """Overrides that name token files by key of [data]; no tokenizer unless `more` has one."""
    words = ["data.tokenizer=none", "data.valid=[]", "model.vocab_size=300"]
    for key, names in sets.items():
        words.append(f"data.{key}={json.dumps([str(folder / 'data' / name) for name in names])}")
    return [*words, *more]


def job(folder: Path, *more: str, **sets: Sequence[str]) -> None:
    config = runs.load_config(folder / "config.toml", given(folder, *more, **sets))
    prepare_job(config, 1)


def refusal(folder: Path, *more: str, **sets: Sequence[str]) -> str:
    with pytest.raises(DataError, match="have different tokenizers; if that is meant") as caught:
        job(folder, *more, **sets)
    assert "\n" not in str(caught.value)
    job(folder, *more, "data.any_tokenizer=true", **sets)
    return str(caught.value)


def test_sets_of_one_run(folder: Path) -> None:
    """Named with their tokenizers; the same content at another place is the same."""
    job(folder, train=["one", "twin"], valid=["one"])
    text = refusal(folder, train=["one", "plain"])
    assert f"{folder / 'data' / 'plain'}.bin (bytes, sha256 " in text
    assert f"{folder / 'data' / 'one'}.bin ({folder / 'one'}, sha256 " in text
    for key in ("valid", "test"):
        assert "other.bin" in refusal(folder, train=["one"], **{key: ["other"]})


def test_the_tokenizer_of_the_config(folder: Path) -> None:
    """Against every set; one that cannot be read is refused at once, not at the first save."""
    job(folder, f"data.tokenizer={folder / 'twin.json'}", train=["one"])
    assert "data.tokenizer (bytes" in refusal(folder, "data.tokenizer=bytes", train=["one"])
    for more in ([], ["data.any_tokenizer=true"]):
        with pytest.raises(DataError, match="data.tokenizer: tokenizer 'nope' cannot be read"):
            job(folder, "data.tokenizer=nope", *more, train=["one"])


def test_files_that_do_not_say_are_allowed(folder: Path) -> None:
    """Megatron-LM writes no PREFIX.meta.json."""
    assert "other.bin" in refusal(folder, train=["one", "other"])
    (folder / "data" / "other.meta.json").unlink()
    job(folder, train=["one", "other"])


def test_the_checkpoint_that_a_run_goes_on_from(folder: Path) -> None:
    """Resumed or started from; a run on the tokenizer's twin goes on."""
    config = folder / "config.toml"
    run = runs.go(config, "run", 1, given(folder, train=["one"]))
    again = [f"log.run_dir={run}", "train.resume=auto", "train.steps=2"]
    job(folder, *again, train=["twin"])
    assert "step-00000001 (" in refusal(folder, *again, train=["other"])
    start = [f"model.init_from={run}", f"log.run_dir={folder / 'new'}"]
    job(folder, *start, train=["twin"])
    assert "step-00000001 (" in refusal(folder, *start, train=["plain"])


def test_an_evaluation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused too, with a way around."""
    run = runs.go(folder / "config.toml", "run", 1, given(folder, train=["one"]))
    words = ["eval", str(run), "--device", "cpu", "--seq-len", "12", "--data"]
    prefix = {name: str(folder / "data" / name) for name in ("one", "twin", "other")}
    assert main([*words, prefix["twin"], prefix["one"]]) == 0
    capsys.readouterr()
    assert main([*words, prefix["twin"], prefix["other"]]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "other.bin" in error and "--any-tokenizer" in error
    assert main([*words, prefix["other"], "--any-tokenizer"]) == 0
