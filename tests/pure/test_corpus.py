"""Owns the proof of the demo's data: a sound split, the same on every machine, made once."""

from pathlib import Path

import pytest

from rankmesh.data.corpus import make_demo_data, stdlib_corpus
from rankmesh.data.indexed import TokenFile
from rankmesh.data.tokenizer import load_tokenizer
from rankmesh.errors import DataError


def library(root: Path) -> Path:
    """100 modules, and folders that are no part of the corpus."""
    for i in range(100):
        path = root / f"package{i % 3}" / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def function{i}(): return {i}\n" * 10)
    for name in ("site-packages/numpy", "test", "package0/tests", "encodings", "__pycache__"):
        (root / name).mkdir(parents=True)
        (root / name / "left_out.py").write_text("x = 1\n")
    (root / "package1" / "data.txt").write_text("no source\n")
    return root


def test_the_split_hangs_on_paths_alone(tmp_path: Path) -> None:
    """Other content and other neighbours move no file to the other side."""
    root = library(tmp_path / "lib")
    corpus = stdlib_corpus(root=root)
    assert len(corpus.train) + len(corpus.valid) == 100
    assert 1 <= len(corpus.valid) <= 12
    assert not set(corpus.train) & set(corpus.valid)
    assert list(corpus.train) == sorted(corpus.train)
    for path in corpus.train[:50]:
        path.unlink()
    corpus.valid[0].write_text("other content\n")
    assert stdlib_corpus(root=root).valid == corpus.valid
    elsewhere = stdlib_corpus(root=library(tmp_path / "elsewhere"))
    assert [path.name for path in elsewhere.valid] == [path.name for path in corpus.valid]


def test_the_size_cap(tmp_path: Path) -> None:
    """Fewer files, of all packages, and each on the side where it was."""
    root = library(tmp_path)
    whole, part = stdlib_corpus(root=root), stdlib_corpus(15_000, root=root)
    files = part.train + part.valid
    assert 13_000 < sum(path.stat().st_size for path in files) <= 15_000
    assert set(part.train) < set(whole.train) and set(part.valid) < set(whole.valid)
    assert {path.parent.name for path in part.train} == {"package0", "package1", "package2"}


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    """A cap that leaves one side empty, or a Python without its sources."""
    with pytest.raises(DataError, match="0 files to train on and 0 held out"):
        stdlib_corpus(root=tmp_path)
    with pytest.raises(DataError, match="max_bytes 500"):
        stdlib_corpus(500, root=library(tmp_path))


def test_demo_data(tmp_path: Path) -> None:
    """Made from this Python's own library; a second call only looks."""
    data = make_demo_data(tmp_path / "demo", vocab_size=400, max_bytes=600_000)
    train, valid = TokenFile(data.train_prefix), TokenFile(data.valid_prefix)
    assert train.vocab_size == valid.vocab_size == 400
    assert train.num_tokens > 9 * valid.num_tokens > 9_000
    tokenizer = load_tokenizer(data.tokenizer_path)
    first = tokenizer.decode(train.document(0).tolist())
    assert any(
        first == path.read_text(encoding="utf-8", errors="ignore")
        for path in stdlib_corpus(600_000).train[:3]
    )
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "demo").iterdir()}
    assert make_demo_data(tmp_path / "demo", vocab_size=400, max_bytes=600_000) == data
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "demo").iterdir()} == times


@pytest.mark.parametrize("lost", ["train.idx", "tokenizer.json", "demo.json", "valid.bin"])
def test_demo_data_is_made_again_when_incomplete(tmp_path: Path, lost: str) -> None:
    """After an interruption, or for another vocabulary."""
    folder = tmp_path / "demo"
    make_demo_data(folder, vocab_size=300, max_bytes=150_000)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / lost).unlink()
    make_demo_data(folder, vocab_size=300, max_bytes=150_000)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    make_demo_data(folder, vocab_size=310, max_bytes=150_000)
    assert TokenFile(folder / "train").vocab_size == 310
