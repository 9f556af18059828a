"""Owns the proof that tokenizers add no marks, lose no text and are found by their spec."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers, processors

from rankmesh.data import hf_tokenizer
from rankmesh.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe
from rankmesh.errors import DataError

TEXTS = ["the cat sat on the mat", "a cat and a hat", "what is that mat?\n\n  indeed\n", "x" * 40]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(TEXTS * 3, 300, path)
    return path


def edited(source: Path, target: Path, **settings: object) -> Path:
    """A copy of a tokenizer.json with some of its settings replaced."""
    target.write_text(json.dumps({**json.loads(source.read_text()), **settings}))
    return target


def with_marks(source: Path, target: Path, begin: bool, end: bool) -> Path:
    """A copy whose post-processor puts <s> in front and <|endoftext|> behind, as asked."""
    engine = tokenizers.Tokenizer.from_file(str(source))
    engine.add_special_tokens(["<s>"])
    engine.post_processor = processors.TemplateProcessing(
        single=" ".join(["<s>"] * begin + ["$A"] + ["<|endoftext|>"] * end),
        special_tokens=[("<s>", engine.token_to_id("<s>")), ("<|endoftext|>", 0)],
    )
    engine.save(str(target))
    return target


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    """Any text comes back, and the ids are its UTF-8."""
    text = text.encode(errors="ignore").decode()
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert bytes(ids) == text.encode()
    assert tokenizer.decode([*ids, 256]) == text
    assert [found.tolist() for found in tokenizer.encode_batch([text, text])] == [ids, ids]


def test_the_byte_tokenizer_by_its_spec() -> None:
    """256 bytes and an end mark; half a character is shown as one."""
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)
    assert tokenizer.decode([65, 0xC3]) == "A\ufffd"


@given(st.text())
def test_a_trained_tokenizer_round_trips(trained: Path, text: str) -> None:
    """All 256 bytes are in its alphabet, so that no text is lost."""
    text = text.encode(errors="ignore").decode()
    tokenizer = load_tokenizer(str(trained))
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, tokenizer.eod_id or 0]) == text
    assert tokenizer.encode_batch([text])[0].tolist() == ids


def test_what_is_known_of_a_trained_tokenizer(trained: Path, tmp_path: Path) -> None:
    """Its size, its end mark and its hash; training twice gives the same file."""
    tokenizer = load_tokenizer(str(trained))
    assert 256 < tokenizer.vocab_size <= 300
    assert tokenizer.eod_id == 0
    assert tokenizer.sha256 == hashlib.sha256(trained.read_bytes()).hexdigest()
    train_bpe(iter(TEXTS * 3), 300, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == trained.read_bytes()


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("end", [False, True])
def test_no_habit_adds_a_mark(trained: Path, tmp_path: Path, begin: bool, end: bool) -> None:
    """Field report X08: post-processors that add no mark, a begin, an end, or both."""
    path = with_marks(trained, tmp_path / "tokenizer.json", begin, end)
    plain = tokenizers.Tokenizer.from_file(str(path))
    bare = plain.encode("a cat", add_special_tokens=False).ids
    assert len(plain.encode("a cat").ids) == len(bare) + begin + end
    tokenizer = load_tokenizer(str(path))
    expected = load_tokenizer(str(trained)).encode("a cat")
    assert tokenizer.encode("a cat") == expected
    assert tokenizer.encode_batch(["a cat"])[0].tolist() == expected


def test_text_that_spells_a_mark_stays_text(trained: Path) -> None:
    """Field report X08: a document about tokenizers gains no end mark in its middle."""
    tokenizer = load_tokenizer(str(trained))
    text = "one <|endoftext|> two"
    assert tokenizer.eod_id not in tokenizer.encode(text)
    assert tokenizer.eod_id not in tokenizer.encode_batch([text])[0]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_truncation_and_padding_are_off(trained: Path, tmp_path: Path) -> None:
    """Many tokenizer.json files were saved with the limits of a model."""
    path = edited(
        trained,
        tmp_path / "tokenizer.json",
        truncation={
            "direction": "Right",
            "max_length": 2,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        },
    )
    assert len(tokenizers.Tokenizer.from_file(str(path)).encode(TEXTS[0]).ids) == 64
    assert load_tokenizer(str(path)).decode(load_tokenizer(str(path)).encode(TEXTS[0])) == TEXTS[0]
    assert len(load_tokenizer(str(path)).encode_batch(TEXTS)[0]) < 30


@pytest.mark.parametrize(
    ("side", "content", "mark"),
    [
        ("tokenizer_config.json", {"eos_token": "cat"}, "cat"),
        ("tokenizer_config.json", {"eos_token": {"content": "cat", "lstrip": False}}, "cat"),
        ("special_tokens_map.json", {"eos_token": "cat"}, "cat"),
        ("tokenizer_config.json", {"eos_token": None}, "<|endoftext|>"),
        ("tokenizer_config.json", {"eos_token": "not in the vocabulary"}, "<|endoftext|>"),
        ("other.json", {"eos_token": "cat"}, "<|endoftext|>"),
    ],
)
def test_the_end_mark_is_found(
    trained: Path, tmp_path: Path, side: str, content: object, mark: str
) -> None:
    """In the files beside, else under a well-known name; a folder is as good as the file."""
    (tmp_path / "tokenizer.json").write_bytes(trained.read_bytes())
    engine = tokenizers.Tokenizer.from_file(str(trained))
    engine.add_special_tokens(["cat"])
    engine.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / side).write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.eod_id == engine.token_to_id(mark)
    assert load_tokenizer(str(tmp_path), "<|endoftext|>").eod_id == 0


def nameless(trained: Path, tmp_path: Path) -> Path:
    """A tokenizer whose tokens are none of the well-known marks."""
    content = json.loads(trained.read_text())
    vocab = {
        name.replace("<|endoftext|>", "!?"): i for name, i in content["model"]["vocab"].items()
    }
    return edited(
        trained,
        tmp_path / "tokenizer.json",
        added_tokens=[],
        model={**content["model"], "vocab": vocab},
    )


def test_no_end_mark_is_guessed(trained: Path, tmp_path: Path) -> None:
    """None then; one can be named."""
    path = nameless(trained, tmp_path)
    assert load_tokenizer(str(path)).eod_id is None
    assert load_tokenizer(str(path), "!?").eod_id == 0
    with pytest.raises(DataError, match="has no token '</s>'"):
        load_tokenizer(str(path), "</s>")


def test_ids_with_holes_count_to_the_largest(trained: Path, tmp_path: Path) -> None:
    """The embedding needs a row for the largest id, however few ids there are."""
    content = json.loads(trained.read_text())
    vocab = {**content["model"]["vocab"], "far away": 5_000}
    path = edited(trained, tmp_path / "t.json", model={**content["model"], "vocab": vocab})
    assert load_tokenizer(str(path)).vocab_size == 5_001


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.json", None, "no such file; give 'bytes', a tokenizer.json or a folder"),
        ("tokenizer.json", "{", "not a tokenizer.json"),
        ("tokenizer.json", '{"model": 1}', "not a tokenizer.json"),
    ],
)
def test_a_broken_spec_is_one_line(
    tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    """Naming the file."""
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(tmp_path / name))
    assert words in str(caught.value) and name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_side_file_is_one_line(trained: Path, tmp_path: Path) -> None:
    """An end mark must not depend on a file that could not be read."""
    (tmp_path / "tokenizer.json").write_bytes(trained.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match="tokenizer_config.json: cannot be read"):
        load_tokenizer(str(tmp_path))


def test_the_byte_tokenizer_has_its_own_mark() -> None:
    """An --eod-token would be ignored."""
    with pytest.raises(DataError, match="id 256"):
        load_tokenizer("bytes", "</s>")


@pytest.mark.parametrize("missing", ["tokenizers", "rankmesh.data.hf_tokenizer"])
def test_a_missing_extra_is_one_line(
    trained: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """It names the package and the command; our own mistakes are not dressed up as that."""

    def refuse(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr("importlib.import_module", refuse)
    if missing == "tokenizers":
        with pytest.raises(DataError, match=r"pip install 'rankmesh\[tokenizers\]'"):
            load_tokenizer(str(trained))
    else:
        with pytest.raises(ModuleNotFoundError):
            load_tokenizer(str(trained))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cuts texts after 400 characters, so that small tests meet many cuts."""
    monkeypatch.setattr(hf_tokenizer, "PIECE", 400)
    monkeypatch.setattr(hf_tokenizer, "OVERLAP", 120)
    yield


def long_texts() -> list[str]:
    """Prose, code with indentation, characters of several bytes, one word, one repeated letter."""
    words = [
        "mat",
        "cat",
        "that's",
        "\n\n    ",
        " ",
        "\t",
        "\u00e9t\u00e9",
        "\U0001f600",
        "42",
        "-->",
    ]
    choice = np.random.default_rng(1).integers(0, len(words), 3000)
    return [
        " ".join(words[i] for i in choice),
        "".join(words[i] for i in choice),
        "catmat" * 700,
        "x" * 4001,
        " " * 3000 + "end",
    ]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", ["byte-level", "prefix", "marker"])
def test_long_texts_are_cut_without_a_trace(trained: Path, tmp_path: Path, kind: str) -> None:
    """Field report X18: the ids of a text of any length are those of the text as a whole.

    Also where the tokenizer puts a space or a marker in front of every text that it is given.
    """
    engine = tokenizers.Tokenizer.from_file(str(trained))
    if kind == "prefix":
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "marker":
        engine.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("mat ")])
    engine.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    short = "a cat"
    texts = [short, *long_texts(), short]
    assert min(len(text) for text in texts[1:-1]) > hf_tokenizer.PIECE
    found = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in found] == [tokenizer.encode(text) for text in texts]


@pytest.mark.usefixtures("small_pieces")
def test_long_texts_are_not_encoded_whole(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by a piece, unless two pieces cannot be joined."""
    tokenizer = load_tokenizer(str(trained))
    texts = long_texts()[:2]
    expected = [tokenizer.encode(text) for text in texts]
    monkeypatch.setattr(hf_tokenizer.HFTokenizer, "encode", lambda *_: pytest.fail("whole"))
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected
