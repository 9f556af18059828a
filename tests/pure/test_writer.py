"""Owns the proof that token files are Megatron-LM's, byte for byte, both ways, and are put in place
whole.

The bytes below were written by megatron-core 0.16.1, `IndexedDatasetBuilder`, from the documents
beside them.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.data import writer
from rankmesh.data.indexed import TokenFile
from rankmesh.data.writer import TokenParts, TokenWriter
from rankmesh.errors import DataError

MAGIC = "4d4d4944494458000001000000000000"
# documents, vocabulary where ours gives that dtype, .bin, .idx: one sequence a document.
WRITTEN = [
    (
        [[1, 2, 3], [], [4, 5], [65499], []],
        None,
        "01000200030004000500dbff",
        MAGIC
        + "000803000000000000000600000000000000030000000200000001000000000000000000000006000000"
        "000000000a000000000000000000000000000000010000000000000001000000000000000200000000000000"
        "03000000000000000300000000000000",
    ),
    (
        [[1, 2, 3], [], [4, 5], [128255], []],
        128_256,
        "0100000002000000030000000400000005000000fff40100",
        MAGIC
        + "00040300000000000000060000000000000003000000020000000100000000000000000000000c000000"
        "0000000014000000000000000000000000000000010000000000000001000000000000000200000000000000"
        "03000000000000000300000000000000",
    ),
]
# Sequences of several a document: [1, 2, 3], then [4] and [5, 65499] with an empty document after
# it, then [7].
SENTENCES = (
    "01000200030004000500dbff0700",
    MAGIC + "000804000000000000000500000000000000030000000100000002000000010000000000000000000000"
    "060000000000000008000000000000000c000000000000000000000000000000010000000000000003000000"
    "0000000003000000000000000400000000000000",
)


def put(prefix: Path, tokens: str, index: str) -> TokenFile:
    """The pair with these bytes."""
    Path(f"{prefix}.bin").write_bytes(bytes.fromhex(tokens))
    Path(f"{prefix}.idx").write_bytes(bytes.fromhex(index))
    return TokenFile(prefix)


@pytest.mark.parametrize("case", [0, 1])
def test_megatrons_files_are_read(tmp_path: Path, case: int) -> None:
    """uint16 and int32; an empty document is a bound without a sequence."""
    documents, _, tokens, index = WRITTEN[case]
    file = put(tmp_path / "text", tokens, index)
    assert [file.document(i).tolist() for i in range(file.num_documents)] == documents
    assert file.num_sequences == 3


def test_megatrons_files_of_sentences_are_read(tmp_path: Path) -> None:
    """Several sequences of one document are one document."""
    file = put(tmp_path / "text", *SENTENCES)
    assert [file.document(i).tolist() for i in range(file.num_documents)] == [
        [1, 2, 3],
        [4, 5, 65499],
        [],
        [7],
    ]


def test_our_files_are_megatrons(tmp_path: Path) -> None:
    """Byte for byte, empty documents and all."""
    documents, vocab_size, tokens, index = WRITTEN[1]
    assert vocab_size is not None
    with TokenWriter(tmp_path / "text", vocab_size) as out:
        for document in documents:
            out.add(document)
        out.commit()
    assert (tmp_path / "text.bin").read_bytes().hex() == tokens
    assert (tmp_path / "text.idx").read_bytes().hex() == index


def test_our_16_bit_files_are_megatrons(tmp_path: Path) -> None:
    """Through the parts, in two pieces, as `prepare` writes them."""
    documents, _, tokens, index = WRITTEN[0]
    parts = TokenParts(tmp_path, np.dtype("<u2"))
    for some in (documents[:2], documents[2:]):
        lengths = np.array([len(document) for document in some], np.int32)
        parts.append(np.array(sum(some, []), np.uint16), lengths)
    parts.publish(tmp_path / "text", None)
    parts.close()
    assert (tmp_path / "text.bin").read_bytes().hex() == tokens
    assert (tmp_path / "text.idx").read_bytes().hex() == index


@given(
    documents=st.lists(st.lists(st.integers(0, 299), max_size=5), max_size=20),
    block=st.integers(1, 4),
    cut=st.integers(0, 20),
)
def test_the_index_does_not_depend_on_how_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], block: int, cut: int
) -> None:
    """Blocks of any size, and parts that were cut off and gone on with, give the same bytes."""
    folder = tmp_path_factory.mktemp("parts")
    with TokenWriter(folder / "whole", 300) as out:
        for document in documents:
            out.add(document)
        out.commit()
    first, rest = documents[:cut], documents[cut:]
    parts = TokenParts(folder, out.dtype)
    for document in (*first, [1, 2, 3]):
        parts.append(np.array(document, np.int32), np.array([len(document)], np.int32))
    parts.close()
    parts = TokenParts(folder, out.dtype, len(first), sum(map(len, first)))
    for document in rest:
        parts.append(np.array(document, np.int32), np.array([len(document)], np.int32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_BLOCK", block)
        parts.publish(folder / "text", None)
    parts.close()
    for ending in ("bin", "idx"):
        assert (folder / f"text.{ending}").read_bytes() == (folder / f"whole.{ending}").read_bytes()
    file = TokenFile(folder / "text")
    assert [file.document(i).tolist() for i in range(file.num_documents)] == documents


def test_parts_that_lost_something_are_refused(tmp_path: Path) -> None:
    """The journal says more than the disk holds."""
    parts = TokenParts(tmp_path, np.dtype("<u2"))
    parts.append(np.array([1, 2, 3]), np.array([3], np.int32))
    parts.close()
    with pytest.raises(DataError, match="6 bytes, expected at least 8"):
        TokenParts(tmp_path, np.dtype("<u2"), 1, 4)
    with pytest.raises(DataError, match="4 bytes, expected at least 8"):
        TokenParts(tmp_path, np.dtype("<u2"), 2, 3)
