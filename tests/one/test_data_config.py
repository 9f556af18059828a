"""Owns the proof that [data] reaches the samples: prefixes, weights and the split by documents."""

from pathlib import Path

import pytest

from rankmesh.config.load import load_config
from rankmesh.data.writer import TokenWriter
from rankmesh.errors import DataError
from rankmesh.train.build import Job, prepare_job

SEQ_LEN = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files: `a` of 100 documents of ids 0 to 99, `b` of 40 of ids 100 to 139."""
    for name, ids in (("a", range(100)), ("b", range(100, 140))):
        with TokenWriter(tmp_path / name, 256) as writer:
            for token in ids:
                writer.add([token] * (SEQ_LEN + 1))
            writer.commit()
    return tmp_path


def job(folder: Path, train: str, *more: str) -> Job:
    """A checked config of the smallest model."""
    entries = train.replace("a", str(folder / "a")).replace("B", str(folder / "b"))
    words = ["model.preset=llama-tiny", f"data.seq_len={SEQ_LEN}", f"data.train={entries}", *more]
    return prepare_job(load_config(None, words), 1)


def test_prefixes_alone_are_one_list(folder: Path) -> None:
    made = job(folder, "['a', 'B']")
    assert made.train.weights is None and made.valid is None and made.test is None
    assert made.train.sizes == (124, 49)


def test_pairs_are_mixed_by_weight(folder: Path) -> None:
    """A prefix alone among pairs has weight 1."""
    made = job(folder, "['a', ['B', 0.25]]", f"data.valid=['{folder / 'b'}']")
    assert made.train.weights == (1.0, 0.25)
    assert made.valid is not None and made.valid.weights is None


def test_a_split_makes_all_three(folder: Path) -> None:
    """Of one prefix or several, each cut by its own documents; disjoint."""
    made = job(folder, "['a']", "data.split=90,8,2")
    assert made.valid is not None and made.test is not None
    parts = (made.train, made.valid, made.test)
    ids = [{int(t) for i in range(len(one)) for t in one.sample(i)} for one in parts]
    assert ids == [set(range(90)), set(range(90, 98)), {98, 99}]
    both = job(folder, "[['a', 3], ['B', 1]]", "data.split=[0.9, 0.1]")
    assert both.test is None and both.valid is not None
    assert both.train.weights == both.valid.weights == (3.0, 1.0)
    assert [file.num_tokens for file in both.valid.files] == [50, 20]
    assert both.tokenizer is None


def test_a_part_without_samples_is_refused(folder: Path) -> None:
    """By the file's name and the documents that the split left it."""
    with pytest.raises(DataError, match=r"a.bin \(documents 99 to 99 of 100\): 0 tokens"):
        job(folder, "['a']", "data.split=999,1,10")
