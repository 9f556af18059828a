"""`rankmesh generate`: how tokens are chosen, and the command from weights to text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankmesh import nn
from rankmesh.checkpoint.source import open_weights
from rankmesh.checkpoint.weights import LocalSlice, write_weights
from rankmesh.cli.main import main
from rankmesh.errors import ConfigError
from rankmesh.specs.placement import parts
from rankmesh.specs.presets import preset
from rankmesh.train.generate import Sampling, generate, load_model, probabilities

SPEC = preset("llama-tiny", vocab_size=300, max_seq_len=16)
LOGITS = torch.tensor([0.0, 3.0, 1.0, 3.0, -2.0])


def test_temperature_zero_takes_the_first_of_the_largest() -> None:
    assert probabilities(LOGITS, Sampling(temperature=0)).tolist() == [0, 1, 0, 0, 0]


def test_plain_sampling_is_softmax() -> None:
    expected = (LOGITS.double() / 0.5).softmax(0)
    assert torch.allclose(probabilities(LOGITS, Sampling(temperature=0.5)), expected)


def test_top_k_keeps_k_even_among_equals() -> None:
    assert probabilities(LOGITS, Sampling(top_k=1)).tolist() == [0, 1, 0, 0, 0]
    three = probabilities(LOGITS, Sampling(top_k=3))
    assert three[[0, 4]].tolist() == [0, 0]
    assert torch.allclose(three[[1, 3, 2]], torch.tensor([3.0, 3.0, 1.0]).double().softmax(0))
    assert torch.equal(probabilities(LOGITS, Sampling(top_k=9)), probabilities(LOGITS, Sampling()))


def test_top_p_keeps_the_token_that_crosses_the_line() -> None:
    """Of 0.5, 0.3, 0.2 top_p 0.6 needs the first two."""
    logits = torch.tensor([0.2, 0.5, 0.3]).log()
    kept = probabilities(logits, Sampling(top_p=0.6))
    assert torch.allclose(kept, torch.tensor([0, 0.625, 0.375]).double())
    assert probabilities(logits, Sampling(top_p=1e-9)).tolist() == [0, 1, 0]


@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=40),
    st.floats(0.05, 5),
    st.integers(0, 50),
    st.floats(0.01, 1),
)
def test_filters_leave_a_distribution_that_keeps_the_order(
    values: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.tensor(values)
    kept = probabilities(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    assert kept.sum().item() == pytest.approx(1)
    assert kept[logits.argmax()] > 0
    assert top_k == 0 or int((kept > 0).sum()) <= top_k
    dropped = logits[kept == 0]
    if len(dropped):
        assert dropped.max() <= logits[kept > 0].min()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Sampling(**options)  # type: ignore[arg-type]


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {part.name: torch.randn(part.shape, generator=generator) * 0.3 for part in parts(SPEC)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    local = [
        LocalSlice(name, tuple(t.shape), tuple(slice(0, size) for size in t.shape), t)
        for name, t in tensors().items()
    ]
    path = tmp_path / "run" / "checkpoints" / "step-00000005"
    write_weights(path, local, spec=SPEC, step=5, tokenizer="bytes")
    return path


@pytest.fixture
def model(folder: Path) -> nn.Transformer:
    return load_model(open_weights(folder))


def test_greedy_follows_the_logits_and_keeps_to_the_context(model: nn.Transformer) -> None:
    prompt = [5, 6, 7]
    made = list(
        generate(
            model, prompt, max_new_tokens=20, context=16, sampling=Sampling(temperature=0),
            vocab_size=257,
        )
    )  # fmt: skip
    assert len(made) == 20
    tokens = [*prompt]
    for token in made:
        window = torch.tensor(tokens[-16:])
        with torch.no_grad():
            hidden, _ = model(window, nn.Layout.plain(1, len(window)))
            logits = model.logits(hidden)[-1, :257]
        assert token == int(logits.argmax())
        tokens.append(token)


def test_equal_seeds_draw_equal_tokens(model: nn.Transformer) -> None:
    def drawn(seed: int) -> list[int]:
        return list(
            generate(
                model, [1], max_new_tokens=12, context=16, sampling=Sampling(), seed=seed,
                vocab_size=257,
            )
        )  # fmt: skip

    assert drawn(1) == drawn(1) != drawn(2)
    assert max(drawn(1) + drawn(2)) < 257


def test_the_stop_token_ends_the_text_and_is_not_part_of_it(model: nn.Transformer) -> None:
    greedy = Sampling(temperature=0)
    free = list(generate(model, [1], max_new_tokens=6, context=16, sampling=greedy))
    stop = free[3]
    cut = list(generate(model, [1], max_new_tokens=6, context=16, sampling=greedy, stop_id=stop))
    assert cut == free[: free.index(stop)]


def test_prompts_that_the_model_cannot_read_are_refused(model: nn.Transformer) -> None:
    for prompt, words in (([], "no tokens"), ([300], "token 300; the model knows 0 to 299")):
        with pytest.raises(ConfigError, match=words):
            next(generate(model, prompt, max_new_tokens=1, context=16, sampling=Sampling()))


def test_the_command_prints_prompt_and_continuation(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(folder.parent.parent)
    words = ["--prompt", "ab", "--max-new-tokens", "5", "--seed", "3", "--device", "cpu"]
    assert main(["generate", run, *words]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("ab")
    assert main(["generate", str(folder), *words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] + "\n" == printed
    assert result["prompt"] == "ab" and len(result["tokens"]) <= 5


def test_without_a_prompt_a_document_begins(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(folder), "--max-new-tokens", "3", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--top-p", "2"], "top_p is 2.0"),
        (["--bos-id", "300"], "token 300; the model knows 0 to 299"),
        (["--device", "toaster"], "--device is 'toaster'"),
        (["--tokenizer", "nowhere.json"], "nowhere.json"),
    ],
)
def test_mistakes_exit_with_2_and_one_line(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(folder), "--prompt", "a", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_weights_without_a_tokenizer_need_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = [
        LocalSlice(name, tuple(t.shape), tuple(slice(0, size) for size in t.shape), t)
        for name, t in tensors().items()
    ]
    write_weights(tmp_path / "w", local, spec=SPEC, step=5)
    assert main(["generate", str(tmp_path / "w"), "--prompt", "a"]) == 2
    assert "give --tokenizer" in capsys.readouterr().err
