"""Owns the proof of which files `prepare` reads, in which order, and as what."""

from pathlib import Path

import pytest

from rankmesh.data.inputs import find_inputs
from rankmesh.errors import DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder as people have them: text, archives of text, and what is none."""
    names = [
        "b.jsonl",
        "a.txt",
        "deep/er/c.jsonl.gz",
        "deep/d.parquet",
        "deep/e.json.zst",
        "deep/f.MD",
        "deep/out.bin",
        "deep/out.idx",
        "deep/out.meta.json",
        "deep/photo.png",
        "deep/code.py",
        ".hidden.txt",
        ".cache/g.txt",
    ]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * (1 + len(name)))
    return tmp_path


def names(root: Path, *patterns: str, kind: str = "auto") -> list[str]:
    """Paths, relative to the root, that the patterns under it mean."""
    found = find_inputs([str(root / pattern) for pattern in patterns], kind)
    return [one.path.relative_to(root).as_posix() for one in found]


def test_a_folder_gives_what_can_be_read(root: Path) -> None:
    """Sorted by path; hidden files, token files and unknown endings are left out."""
    assert names(root, ".") == [
        "a.txt",
        "b.jsonl",
        "deep/d.parquet",
        "deep/e.json.zst",
        "deep/er/c.jsonl.gz",
        "deep/f.MD",
    ]


def test_a_folder_of_one_kind_gives_every_visible_file(root: Path) -> None:
    """A folder of sources is text if its user says so."""
    assert names(root, "deep", kind="text") == [
        "deep/code.py",
        "deep/d.parquet",
        "deep/e.json.zst",
        "deep/er/c.jsonl.gz",
        "deep/f.MD",
        "deep/out.bin",
        "deep/out.idx",
        "deep/photo.png",
    ]


def test_patterns_and_their_order(root: Path) -> None:
    """In the order given, each pattern sorted; folders that match are passed over."""
    assert names(root, "deep/**/*.gz", "*.txt", "b.jsonl") == [
        "deep/er/c.jsonl.gz",
        "a.txt",
        "b.jsonl",
    ]
    assert names(root, "deep/?.*") == ["deep/d.parquet", "deep/e.json.zst", "deep/f.MD"]
    assert names(root, "deep/e*") == ["deep/e.json.zst"]


def test_a_file_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    """What exists is meant as it stands."""
    (tmp_path / "a[1].txt").write_text("x")
    assert names(tmp_path, "a[1].txt") == ["a[1].txt"]


def test_kinds_and_packings(root: Path) -> None:
    """By the ending before .gz and .zst, in any case; an unknown ending of a named file is text."""
    found = find_inputs([root, root / "deep/code.py"])
    assert [(one.path.name, one.kind, one.packing) for one in found] == [
        ("a.txt", "text", ""),
        ("b.jsonl", "jsonl", ""),
        ("d.parquet", "parquet", ""),
        ("e.json.zst", "jsonl", ".zst"),
        ("c.jsonl.gz", "jsonl", ".gz"),
        ("f.MD", "text", ""),
        ("code.py", "text", ""),
    ]
    assert all(one.size == one.path.stat().st_size for one in found)


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["a.txt", "a.txt"], "a.txt: is an input twice"),
        ([".", "deep/../b.jsonl"], "b.jsonl: is an input twice"),
        (["deep/er/*", "."], "is an input twice"),
        (["nothing.txt"], "nothing.txt: no such file"),
        (["*.csv"], "as a pattern it matches none"),
        ([".cache/.none"], "no such file"),
    ],
)
def test_what_is_refused(root: Path, patterns: list[str], words: str) -> None:
    """A file read twice would be trained on twice, unseen."""
    with pytest.raises(DataError) as caught:
        names(root, *patterns)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_link_to_a_file_is_that_file(root: Path) -> None:
    """Caches are full of links; two of them to one file are one file twice."""
    (root / "link.jsonl").symlink_to(root / "b.jsonl")
    assert names(root, "link.jsonl") == ["link.jsonl"]
    with pytest.raises(DataError, match="is an input twice"):
        names(root, "link.jsonl", "b.jsonl")
