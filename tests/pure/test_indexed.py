"""Owns the proof of the token file format: bytes, refusals at open, atomic writing, large offsets.

The layout is written out by hand here, so that reader and writer cannot agree on a mistake.
"""

import json
import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.data.indexed import TokenFile, token_dtype
from rankmesh.data.meta import TokenMeta
from rankmesh.data.writer import TokenWriter
from rankmesh.errors import DataError


def index_bytes(code: int, itemsize: int, sequences: list[int], bounds: list[int]) -> bytes:
    """A .idx file from its description, field by field."""
    offsets = [sum(sequences[:i]) * itemsize for i in range(len(sequences))]
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", code)
        + struct.pack("<QQ", len(sequences), len(bounds))
        + struct.pack(f"<{len(sequences)}i", *sequences)
        + struct.pack(f"<{len(offsets)}q", *offsets)
        + struct.pack(f"<{len(bounds)}q", *bounds)
    )


def meta(**changes: int) -> TokenMeta:
    """What goes with `written`, with some fields changed."""
    fields = {"num_documents": 4, "num_tokens": 6, "max_token": 6, **changes}
    return TokenMeta(
        tokenizer="bytes",
        tokenizer_sha256="0" * 64,
        vocab_size=257,
        eod_id=256,
        append_eod=False,
        text_bytes=6,
        **fields,
    )


DOCUMENTS = [[1, 2, 3], [], [4, 5], [6]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A small sound file with an empty document and without a .meta.json."""
    with TokenWriter(tmp_path / "text", 257) as writer:
        for document in DOCUMENTS:
            writer.add(document)
        writer.commit()
    return tmp_path / "text"


def test_the_bytes_are_those_of_the_format(prefix: Path) -> None:
    """One sequence a document; an empty one is a bound without a sequence."""
    assert prefix.with_suffix(".bin").read_bytes() == struct.pack("<6H", 1, 2, 3, 4, 5, 6)
    assert prefix.with_suffix(".idx").read_bytes() == index_bytes(8, 2, [3, 2, 1], [0, 1, 1, 2, 3])


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    """uint16 below 65,500 tokens of vocabulary, else int32, whatever the ids in the file are."""
    assert (token_dtype(65_499), token_dtype(65_500)) == (np.dtype("<u2"), np.dtype("<i4"))
    with TokenWriter(tmp_path / "text", 128_256) as writer:
        writer.add(np.array([7, 128_255]))
        writer.commit()
    assert (tmp_path / "text.bin").read_bytes() == struct.pack("<2i", 7, 128_255)
    assert (tmp_path / "text.idx").read_bytes() == index_bytes(4, 4, [2], [0, 1])


def test_what_was_written_is_read(prefix: Path) -> None:
    """Documents, the concatenation, and slices of it; views cannot change the file."""
    file = TokenFile(prefix)
    assert (file.num_tokens, file.num_documents, file.num_sequences) == (6, 4, 3)
    assert [file.document(i).tolist() for i in range(4)] == DOCUMENTS
    assert file.tokens(0, 6).tolist() == [1, 2, 3, 4, 5, 6]
    assert file.tokens(2, 4).tolist() == [3, 4]
    assert file.tokens(6, 6).size == 0
    assert file.meta is None and file.vocab_size is None
    assert not file.tokens(0, 6).flags.writeable
    for start, stop in ((-1, 2), (4, 3), (0, 7)):
        with pytest.raises(IndexError):
            file.tokens(start, stop)
    with pytest.raises(IndexError):
        file.document(4)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_either_file_names_the_pair(prefix: Path, ending: str) -> None:
    """People paste a file's name where a prefix is meant."""
    assert TokenFile(f"{prefix}{ending}").num_tokens == 6


@pytest.mark.parametrize(
    ("code", "kind"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")]
)
def test_every_integer_dtype_is_read(tmp_path: Path, code: int, kind: str) -> None:
    """Megatron-LM may write any of them; two sequences of one document are one document."""
    (tmp_path / "t.bin").write_bytes(struct.pack(f"<5{kind}", 1, 2, 3, 4, 5))
    (tmp_path / "t.idx").write_bytes(index_bytes(code, struct.calcsize(kind), [2, 3], [0, 2]))
    file = TokenFile(tmp_path / "t")
    assert file.num_documents == 1
    assert file.document(0).tolist() == file.tokens(0, 5).tolist() == [1, 2, 3, 4, 5]


@given(
    documents=st.lists(st.lists(st.integers(0, 256), max_size=8), max_size=12),
    vocab_size=st.sampled_from([257, 70_000]),
)
def test_any_documents_come_back(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], vocab_size: int
) -> None:
    """Also none at all, and only empty ones."""
    path = tmp_path_factory.mktemp("any") / "text"
    with TokenWriter(path, vocab_size) as writer:
        for document in documents:
            writer.add(document)
        writer.commit()
    file = TokenFile(path)
    assert [file.document(i).tolist() for i in range(file.num_documents)] == documents
    assert file.tokens(0, file.num_tokens).tolist() == sum(documents, [])
    assert writer.max_token == max(sum(documents, []), default=-1)


def cut(size: int) -> Callable[[bytes], bytes]:
    """Keeps the first `size` bytes."""
    return lambda content: content[:size]


def put(place: int, value: bytes) -> Callable[[bytes], bytes]:
    """Overwrites bytes at `place`."""
    return lambda content: content[:place] + value + content[place + len(value) :]


# The index of `prefix` has 34 + 3 * 12 + 5 * 8 = 110 bytes, the tokens have 12.
BROKEN: list[tuple[str, Callable[[bytes], bytes], list[str]]] = [
    (".bin", cut(11), ["11 bytes", "expected 12", "6 tokens"]),
    (".bin", cut(6), ["6 bytes", "expected 12"]),
    (".bin", cut(0), ["0 bytes", "expected 12"]),
    (".bin", lambda content: content + b"\0", ["13 bytes", "expected 12"]),
    (".idx", cut(0), ["truncated", "0 bytes", "34"]),
    (".idx", cut(5), ["truncated", "5 bytes", "34"]),
    (".idx", cut(33), ["truncated", "33 bytes", "34"]),
    (".idx", cut(34), ["34 bytes", "expected 110"]),
    (".idx", cut(109), ["109 bytes", "expected 110"]),
    (".idx", lambda content: content + b"\0\0", ["112 bytes", "expected 110"]),
    (".idx", lambda content: content + b"\0\0\0", ["113 bytes", "multimodal"]),
    (".idx", put(0, b"m"), ["not a token index", "MMIDIDX"]),
    (".idx", put(8, b"\1"), ["not a token index"]),
    (".idx", lambda _: b"PK\3\4" * 50, ["not a token index"]),
    (".idx", put(9, b"\2"), ["version 2", "expected 1"]),
    (".idx", put(17, b"\7"), ["dtype code 7", "floats"]),
    (".idx", put(17, b"\xc8"), ["dtype code 200"]),
    (".idx", put(17, b"\4"), ["sequence 1", "corrupt"]),
    (".idx", put(18, b"\xff" * 8), ["110 bytes"]),
    (".idx", put(34, struct.pack("<i", -3)), ["sequence 0", "-3"]),
    (".idx", put(54, struct.pack("<q", 7)), ["sequence 1", "byte 7"]),
    (".idx", put(70, struct.pack("<q", 1)), ["document bounds"]),
    (".idx", put(78, struct.pack("<q", 3)), ["document bounds"]),
    (".idx", put(102, struct.pack("<q", 2)), ["document bounds", "3 sequences"]),
]


@pytest.mark.parametrize("case", range(len(BROKEN)))
def test_a_broken_file_is_refused_at_open(prefix: Path, case: int) -> None:
    """Field report X03: one line with the file, the expected and the real size."""
    ending, change, words = BROKEN[case]
    path = prefix.with_suffix(ending)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        TokenFile(prefix)
    text = str(caught.value)
    assert "\n" not in text and str(path) in text
    assert [word for word in words if word not in text] == []


@given(place=st.integers(0, 109), bit=st.integers(0, 7))
def test_any_flipped_bit_of_the_index_is_refused(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    """Field report X03: unless the index still describes the same tokens, it is refused.

    Of all 880 bits only bounds between documents can move unseen.
    """
    path = tmp_path_factory.mktemp("flip") / "text"
    path.with_suffix(".bin").write_bytes(struct.pack("<6H", 1, 2, 3, 4, 5, 6))
    content = bytearray(index_bytes(8, 2, [3, 2, 1], [0, 1, 1, 2, 3]))
    content[place] ^= 1 << bit
    path.with_suffix(".idx").write_bytes(bytes(content))
    try:
        file = TokenFile(path)
    except DataError as error:
        assert "\n" not in str(error)
    else:
        assert 78 <= place < 102 or (place == 17 and file.dtype.itemsize == 2)
        assert file.num_tokens == 6


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_missing_half_is_refused(prefix: Path, ending: str) -> None:
    """Field report X03: copied without its partner."""
    path = prefix.with_suffix(ending)
    path.unlink()
    with pytest.raises(DataError, match="no such file") as caught:
        TokenFile(prefix)
    assert str(path) in str(caught.value)


def test_an_unreadable_file_is_refused(prefix: Path) -> None:
    """A folder in the place of a file."""
    prefix.with_suffix(".bin").unlink()
    prefix.with_suffix(".bin").mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        TokenFile(prefix)


@pytest.mark.parametrize("ids", [[257], [0, -1], [70_000]])
def test_ids_outside_the_vocabulary_are_not_written(tmp_path: Path, ids: list[int]) -> None:
    """They would wrap in uint16 and train on other tokens."""
    with (
        pytest.raises(DataError, match="vocabulary of 257"),
        TokenWriter(tmp_path / "text", 257) as writer,
    ):
        writer.add(ids)
    assert list(tmp_path.iterdir()) == []


def test_without_commit_nothing_remains(prefix: Path) -> None:
    """An error in the middle, or a forgotten commit, leaves the older file as it was."""
    before = {path.name: path.read_bytes() for path in prefix.parent.iterdir()}
    with pytest.raises(KeyboardInterrupt), TokenWriter(prefix, 257) as writer:
        writer.add([9] * 100_000)
        raise KeyboardInterrupt
    with TokenWriter(prefix, 257) as writer:
        writer.add([9])
    assert {path.name: path.read_bytes() for path in prefix.parent.iterdir()} == before


@pytest.mark.parametrize("stop", range(3))
def test_a_crash_while_committing_leaves_no_mixed_pair(
    prefix: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """Field report X03: after each of the renames, what can be opened is wholly new."""
    done: list[str] = []
    rename = os.replace

    def fail_at(source: Path, target: Path) -> None:
        if len(done) == stop:
            raise OSError(5, "the machine stopped here")
        done.append(str(target))
        rename(source, target)

    monkeypatch.setattr(os, "replace", fail_at)
    with pytest.raises(OSError, match="stopped here"), TokenWriter(prefix, 257) as writer:
        for document in ([9, 9, 9], [], [9, 9], [9]):
            writer.add(document)
        writer.commit(meta(max_token=9))
    with pytest.raises(DataError, match="no such file"):
        TokenFile(prefix)
    assert not [path for path in prefix.parent.iterdir() if "tmp" in path.name]


def test_meta_comes_with_the_file(prefix: Path) -> None:
    """What `prepare` knew is known at open, and replaced together with the tokens."""
    for with_meta in (True, False):
        with TokenWriter(prefix, 257) as writer:
            for document in DOCUMENTS:
                writer.add(document)
            writer.commit(meta() if with_meta else None)
        file = TokenFile(prefix)
        assert file.meta == (meta() if with_meta else None)
        assert file.vocab_size == (257 if with_meta else None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (meta(num_tokens=7).to_json(), "7 tokens, but the token file beside it has 4 and 6"),
        ("{", "cannot be read"),
        ("[]", "format_version is None"),
        (json.dumps({"format_version": 3}), "format_version is 3, this version reads 1 and 2"),
        (json.dumps({"format_version": 1, "x": 1}), "fields are"),
    ],
)
def test_meta_of_another_file_is_refused(prefix: Path, content: str, words: str) -> None:
    """One line, with the file's name."""
    Path(f"{prefix}.meta.json").write_text(content)
    with pytest.raises(DataError) as caught:
        TokenFile(prefix)
    assert words in str(caught.value) and f"{prefix}.meta.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_million_documents_cost_nothing(tmp_path: Path) -> None:
    """All are checked at open, in blocks: in a few milliseconds and no memory to speak of."""
    count, length = 10**6, 6_400
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1)
    lengths = np.full(count, length, "<i4").tobytes()
    bounds = np.arange(count + 1, dtype="<i8")
    offsets = (bounds[:-1] * 2 * length).tobytes()
    (tmp_path / "t.idx").write_bytes(header + lengths + offsets + bounds.tobytes())
    with (tmp_path / "t.bin").open("wb") as stream:
        stream.truncate(2 * count * length)
    tracemalloc.start()
    file = TokenFile(tmp_path / "t")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (file.num_documents, file.num_tokens) == (count, count * length)
    assert file.document_start(count - 1) == (count - 1) * length
    assert peak < 4 * 2**20
    start = time.perf_counter()
    TokenFile(tmp_path / "t")
    # About 20 milliseconds; the limit leaves room for a busy machine.
    assert time.perf_counter() - start < 1.0


def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    """Field report X02: tokens and bytes past 2^32, in files that take no space on disk."""
    length, total = 2**31 - 1, 3 * (2**31 - 1)
    (tmp_path / "t.idx").write_bytes(index_bytes(8, 2, [length] * 3, [0, 1, 2, 3]))
    marks = {0: 1, 2**31: 2, 2**32 - 1: 3, 2**32: 4, total - 1: 5}
    with (tmp_path / "t.bin").open("wb") as stream:
        stream.truncate(2 * total)
        for place, value in marks.items():
            stream.seek(2 * place)
            stream.write(struct.pack("<H", value))
    file = TokenFile(tmp_path / "t")
    assert file.num_tokens == total
    for place, value in marks.items():
        assert file.tokens(place, place + 1).tolist() == [value]
    assert file.document(2).size == length and file.document(2)[-1] == 5
