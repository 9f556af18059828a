"""`rankmesh eval` in one process: which tokens count, and what is made of their loss."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rankmesh as rm
from rankmesh.checkpoint.source import open_weights
from rankmesh.cli.evaluation import Score
from rankmesh.cli.main import main
from rankmesh.data.indexed import TokenFile
from rankmesh.nn import Layout
from rankmesh.train.generate import load_model
from tests import runs

TEXT = "A mesh of ranks holds one model between them, in fp64 or less. " * 6
SEQ_LEN = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run and token files: `text` with bytes known, `random` without, `short`."""
    folder = tmp_path_factory.mktemp("eval")
    rm.train(runs.write_config(folder))
    for name, text in (("text", TEXT), ("short", "abcde")):
        (folder / f"{name}.txt").write_text(text, encoding="ascii")
        words = ["prepare", str(folder / f"{name}.txt"), "--tokenizer", "bytes"]
        assert main([*words, "--out", str(folder / name)]) == 0
    runs.token_file(folder / "random", 9 * SEQ_LEN + 6, seed=3)
    return folder


def evaluate(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> dict[str, Any]:
    given = ["--seq-len", str(SEQ_LEN), "--device", "cpu", "--json", *words]
    assert main(["eval", str(folder / "run"), *given]) == 0
    captured = capsys.readouterr()
    found: dict[str, Any] = json.loads(captured.out.splitlines()[-1])
    return found


def by_hand(folder: Path, prefix: Path) -> tuple[float, int]:
    """Sum of the loss over all targets and their number: one sequence at a time, plain torch."""
    model = load_model(open_weights(folder / "run"), dtype=torch.float64)
    file = TokenFile(prefix)
    tokens = file.tokens(0, file.num_tokens).astype(np.int64)
    total, targets = 0.0, 0
    for start in range(0, len(tokens) - 1, SEQ_LEN):
        piece = torch.from_numpy(tokens[start : start + SEQ_LEN + 1])
        with torch.no_grad():
            hidden, _ = model(piece[:-1], Layout.plain(1, len(piece) - 1, device="cpu"))
            logits = model.logits(hidden)
        total += float(torch.nn.functional.cross_entropy(logits, piece[1:], reduction="sum"))
        targets += len(piece) - 1
    return total, targets


@pytest.mark.parametrize("microbatch", ["1", "4", "100"])
def test_every_target_counts_once(
    microbatch: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Field report L12: the sum over all targets by their number, not a mean of means.

    Those of the file's short end too, which training leaves out.
    """
    prefixes = [folder / name for name in ("text", "random", "short")]
    words = ["--dtype", "fp64", "--microbatch-size", microbatch, "--data", *map(str, prefixes)]
    found = evaluate(capsys, folder, *words)
    assert [row["data"] for row in found["sets"]] == [str(prefix) for prefix in prefixes]
    for row, prefix in zip(found["sets"], prefixes, strict=True):
        total, targets = by_hand(folder, prefix)
        assert row["targets"] == targets == TokenFile(prefix).num_tokens - 1
        assert row["loss"] == pytest.approx(total / targets, rel=1e-9)
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))


def test_bits_per_byte(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the text that was prepared, whatever the tokenizer: the end mark costs bits too."""
    found = evaluate(capsys, folder, "--data", str(folder / "text"))
    (row,) = found["sets"]
    tokens, size = TokenFile(folder / "text").num_tokens, len(TEXT.encode())
    assert tokens == size + 1
    assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2) * tokens / size)


def test_without_known_bytes_there_are_no_bits_per_byte(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of Megatron-LM's has no text size: null, and a dash in the table."""
    found = evaluate(capsys, folder, "--data", str(folder / "random"))
    assert found["sets"][0]["bits_per_byte"] is None
    assert main(["eval", str(folder / "run"), "--data", str(folder / "random")]) == 0
    out = capsys.readouterr().out
    assert "perplexity" in out and " - " in out


def test_it_agrees_with_training(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss that the run logged last for its validation set: the same samples."""
    found = evaluate(capsys, folder, "--data", str(folder / "valid"))
    record = (folder / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert found["sets"][0]["loss"] == pytest.approx(json.loads(record)["eval_loss"], rel=1e-6)
    assert found["step"] == 6 and found["seq_len"] == SEQ_LEN and found["world_size"] == 1


def test_only_the_first_samples(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluate(capsys, folder, "--samples", "3", "--data", str(folder / "random"))
    assert found["sets"][0]["targets"] == 3 * SEQ_LEN
    more = evaluate(capsys, folder, "--samples", "99", "--data", str(folder / "random"))
    assert more["sets"][0]["targets"] == 9 * SEQ_LEN


def test_a_perplexity_beyond_numbers_is_infinite() -> None:
    score = Score(data="x", loss=1000.0, targets=1, bytes_per_token=None)
    assert score.perplexity == math.inf and score.bits_per_byte is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--data", "nowhere"], "nowhere"),
        (["--data", "RANDOM", "--seq-len", "33"], "at most 32"),
        (["--data", "RANDOM", "--seq-len", "0"], "--seq-len 0"),
        (["--data", "RANDOM", "--samples", "0"], "--samples 0"),
        (["--data", "SHORT", "--samples", "1"], "--samples"),
        (["--data", "RANDOM", "--nproc", "0"], "--nproc 0"),
        (["--data", "RANDOM", "--nproc", "2", "--tp", "4"], "tp"),
        (["--data", "RANDOM", "--tp", "3"], "head"),
        ([], "--data"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_one_line(
    words: list[str], text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any process is started."""
    places = {"RANDOM": str(folder / "random"), "SHORT": str(folder / "short")}
    assert main(["eval", str(folder / "run"), *(places.get(word, word) for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and text in error


def test_tokens_beyond_the_vocabulary_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the short end too, of a file that came without facts about itself."""
    tokens = np.zeros(SEQ_LEN + 4, dtype="<u2")
    tokens[-1] = 300
    runs.token_file(tmp_path / "bad", len(tokens))
    (tmp_path / "bad.bin").write_bytes(tokens.tobytes())
    words = ["--seq-len", str(SEQ_LEN), "--data", str(tmp_path / "bad")]
    assert main(["eval", str(folder / "run"), *words]) == 2
    assert "token id 300" in capsys.readouterr().err
