"""Owns the proof that cutting inputs into blocks loses nothing and can be gone on with anywhere."""

import gzip
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.data import blocks
from rankmesh.data.blocks import Block, Position, cut_lines, read_blocks
from rankmesh.data.inputs import find_inputs
from rankmesh.data.sources import BadDocument, read_documents
from rankmesh.errors import DataError


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 bytes, documents of at most 200, so that small tests meet many cuts."""
    monkeypatch.setattr(blocks, "BLOCK", 64)
    monkeypatch.setattr(blocks, "MAX_DOCUMENT", 200)


def found(block: Block) -> list[tuple[str, str]]:
    """(place, text or reason) of each document of a block."""
    return [
        (block.place(one.item, one.line), one.reason)
        if isinstance(one, BadDocument)
        else (block.place(one.item, 1), one.text)
        for one in read_documents(block.kind, block.payload, block.sizes, "text")
    ]


def line(number: int, size: int = 0) -> str:
    return json.dumps({"text": f"{number}:{'x' * size}"})


def write(path: Path, content: bytes) -> Path:
    """Writes the content as the ending asks for."""
    if path.suffix == ".gz":
        content = gzip.compress(content[:50]) + gzip.compress(content[50:])
    elif path.suffix == ".zst":
        pack = zstandard.ZstdCompressor(write_checksum=True).compress
        content = pack(content[:50]) + pack(content[50:])
    path.write_bytes(content)
    return path


@given(
    lengths=st.lists(st.integers(0, 40), max_size=12),
    ends=st.booleans(),
    chunk=st.integers(1, 30),
    limit=st.integers(30, 60),
)
def test_lines_are_cut_whole(lengths: list[int], ends: bool, chunk: int, limit: int) -> None:
    """Joined again they are the stream; a line over the limit comes alone, as nothing."""
    content = b"\n".join(b"abcdefg"[i % 7 : i % 7 + 1] * size for i, size in enumerate(lengths))
    content += b"\n" if ends else b""
    stream = io.BytesIO(content)
    position, kept = 0, []
    for payload, taken in cut_lines(lambda _: stream.read(chunk), limit):
        part = content[position : position + taken]
        position += taken
        assert payload in (part, b"")
        assert part.endswith(b"\n") or position == len(content)
        if not payload:
            assert part.rstrip(b"\n").count(b"\n") == 0 and len(part) > limit
        kept += payload.splitlines()
    assert position == len(content)
    assert kept == [one.rstrip(b"\n") for one in content.splitlines(True) if len(one) <= limit]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_json_lines_packed_or_not(tmp_path: Path, ending: str) -> None:
    """The same documents at the same places, over frames and members; a long line is passed over
    and counted.
    """
    rows = [line(i, 7 * i % 50) for i in range(30)]
    rows[11] = line(11, 500)
    path = write(tmp_path / f"in{ending}", "\n".join(rows).encode())
    made = list(read_blocks(find_inputs([path]), "text"))
    assert len(made) > 10
    expected = [(f"{path}:{i + 1}", json.loads(row)["text"]) for i, row in enumerate(rows)]
    expected[11] = (f"{path}:12", "over 1 GiB")
    assert [one for block in made for one in found(block)] == expected
    assert made[-1].read == path.stat().st_size


def mixed(tmp_path: Path) -> list[Path]:
    """Inputs of every kind."""
    table = pa.table({"text": [None if i % 5 == 3 else f"row {i} {'y' * i}" for i in range(40)]})
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=7)
    return [
        write(tmp_path / "a.jsonl", "".join(line(i) + "\n" for i in range(20)).encode()),
        write(tmp_path / "one.txt", b"first text"),
        write(tmp_path / "two.txt.gz", b"second text " * 12),
        write(tmp_path / "three.txt", b"third text " * 40),
        tmp_path / "c.parquet",
        write(tmp_path / "empty.jsonl", b""),
        write(tmp_path / "b.jsonl.zst", "".join(line(i) + "\n" for i in range(20)).encode()),
        write(tmp_path / "four.txt.zst", b"fourth text"),
    ]


@pytest.mark.usefixtures("small")
def test_reading_goes_on_at_the_end_of_any_block(tmp_path: Path) -> None:
    """What follows a block is what is read from its end on, whatever the kind of input."""
    inputs = find_inputs(mixed(tmp_path))
    whole = list(read_blocks(inputs, "text"))
    documents = [one for block in whole for one in found(block)]
    places = [place for place, _ in documents]
    assert len(set(places)) == len(places) == 20 + 3 + 40 + 20 + 1
    assert [block.read for block in whole] == sorted(block.read for block in whole)
    assert whole[-1].read == sum(one.size for one in inputs)
    for number, block in enumerate(whole):
        rest = [one for later in read_blocks(inputs, "text", block.end) for one in found(later)]
        assert rest == [one for later in whole[number + 1 :] for one in found(later)]


def test_small_files_share_a_block(tmp_path: Path) -> None:
    """Up to about its size; each file is a document with its own path."""
    paths = [write(tmp_path / f"{i:03}.txt", f"text {i}".encode()) for i in range(300)]
    (block,) = read_blocks(find_inputs([tmp_path]), "text")
    assert found(block) == [(f"{path}:1", f"text {i}") for i, path in enumerate(paths)]
    assert block.end == Position(300)


@pytest.mark.usefixtures("small")
def test_parquet_rows(tmp_path: Path) -> None:
    """Missing and overlong values are counted at their row; texts share blocks."""
    texts = ["a", None, "\u00e9t\u00e9", "", "z" * 300, "b" * 70, "c"]
    for name, column in (
        ("plain", pa.array(texts)),
        ("large", pa.array(texts, pa.large_string())),
        ("words", pa.array(texts).dictionary_encode()),
    ):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"n": list(range(7)), "text": column}), path)
        made = [one for block in read_blocks(find_inputs([path]), "text") for one in found(block)]
        assert made == [
            (f"{path}:1", "a"),
            (f"{path}:2", "value is not text"),
            (f"{path}:3", "\u00e9t\u00e9"),
            (f"{path}:4", "empty"),
            (f"{path}:5", "over 1 GiB"),
            (f"{path}:6", "b" * 70),
            (f"{path}:7", "c"),
        ]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def replace(content: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_bytes(content)

    return change


def number_column(path: Path) -> None:
    pq.write_table(pa.table({"text": [1, 2], "body": ["x", "y"]}), path)


def other_column(path: Path) -> None:
    pq.write_table(pa.table({"body": ["x", "y"], "title": ["x", "y"]}), path)


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("in.jsonl.gz", cut, "ended before the end-of-stream marker"),
        ("in.jsonl.gz", flip, "cannot be read"),
        ("in.jsonl.gz", replace(b"no gzip"), "Not a gzipped file"),
        ("in.txt.gz", cut, "ended before the end-of-stream marker"),
        ("in.jsonl.zst", cut, "ends in the middle of a frame"),
        ("in.jsonl.zst", flip, "cannot be read: "),
        ("in.jsonl.zst", replace(b"no zstd"), "damaged zstd stream"),
        ("in.txt.zst", cut, "ends in the middle of a frame"),
        ("in.parquet", replace(b"PAR1"), "not a parquet file, or damaged"),
        ("in.parquet", replace(b""), "not a parquet file, or damaged"),
        ("in.parquet", replace(struct.pack("<I", 0) + b"PAR1" * 4), "not a parquet file"),
        ("in.parquet", number_column, "column 'text' holds int64, not text"),
        ("in.parquet", other_column, "no column 'text'; it has body, title"),
        ("in.jsonl", lambda path: path.unlink(), "No such file"),
    ],
)
def test_damaged_files_are_one_line(
    tmp_path: Path, name: str, damage: Callable[[Path], None], words: str
) -> None:
    """Field report X18: a file that cannot be read to its end stops the job, by its name."""
    rows = "".join(line(i * 2654435761 % 10**9, i % 60) + "\n" for i in range(500)).encode()
    path = write(tmp_path / name, rows)
    inputs = find_inputs([path])
    damage(path)
    with pytest.raises(DataError) as caught:
        for block in read_blocks(inputs, "text"):
            found(block)
    assert str(path) in str(caught.value) and words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("ending", "package"), [(".zst", "zstandard"), (".parquet", "pyarrow")])
def test_a_missing_extra_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, package: str
) -> None:
    """It names the package and the command that brings it."""

    def refuse(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    (tmp_path / f"in{ending}").write_bytes(b"x")
    monkeypatch.setattr("importlib.import_module", refuse)
    with pytest.raises(DataError) as caught:
        list(read_blocks(find_inputs([tmp_path / f"in{ending}"], "auto"), "text"))
    words = f"a {ending} needs the package {package!r}: pip install 'rankmesh[{package}]'"
    assert str(caught.value) == words


def test_a_file_that_became_shorter_is_not_gone_on_with(tmp_path: Path) -> None:
    """A packed one whose size and time are those of before, which none should have."""
    path = write(tmp_path / "in.jsonl.gz", line(1).encode())
    with pytest.raises(DataError, match="shorter than when the interrupted job read it"):
        list(read_blocks(find_inputs([path]), "text", Position(0, 10_000, 3)))
