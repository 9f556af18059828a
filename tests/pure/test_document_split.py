"""Owns the proof of the split by documents: disjoint, complete, and Megatron-LM's rule."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.data.indexed import TokenFile
from rankmesh.data.samples import Samples, check_vocab
from rankmesh.data.split import split_bounds, split_documents
from rankmesh.data.writer import TokenWriter
from rankmesh.errors import DataError

RATIOS = st.lists(st.floats(0, 1e6), min_size=1, max_size=3).filter(any)


def file_of(prefix: Path, lengths: list[int]) -> TokenFile:
    """Tokens 0, 1, 2, ... in documents of these lengths."""
    with TokenWriter(prefix, 10_000) as writer:
        start = 0
        for length in lengths:
            writer.add(list(range(start, start + length)))
            start += length
        writer.commit()
    return TokenFile(prefix)


@given(ratios=RATIOS, num_documents=st.integers(0, 10**12))
def test_bounds_are_the_rounded_shares(ratios: list[float], num_documents: int) -> None:
    """They rise from 0 to the end; each is within 1/2 of its exact place."""
    bounds = split_bounds(num_documents, ratios)
    assert bounds[0] == 0 and bounds[-1] == num_documents
    assert list(bounds) == sorted(bounds)
    exact = [Fraction(str(ratio)) for ratio in ratios]
    for i, bound in enumerate(bounds):
        assert abs(bound - num_documents * sum(exact[:i]) / sum(exact)) <= Fraction(1, 2)


@pytest.mark.parametrize("num_documents", [0, 1, 2, 10, 999, 1000, 12_345, 10**6])
@pytest.mark.parametrize("ratios", [(969, 30, 1), (98, 2, 0), (0.9, 0.05, 0.05), (1, 1, 1)])
def test_bounds_are_those_of_megatron(num_documents: int, ratios: tuple[float, ...]) -> None:
    """Its formula, in floats: int(round(share * float(n))) on shares of sum 1."""
    total = sum(ratios)
    shares = np.cumsum([0.0, *[ratio / total for ratio in ratios]])
    expected = [int(round(share * float(num_documents))) for share in shares]
    assert list(split_bounds(num_documents, ratios)) == expected


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=30), ratios=RATIOS)
def test_parts_are_disjoint_and_complete(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], ratios: list[float]
) -> None:
    """Every token is in one part, whole documents at a time, in the order of the file."""
    file = file_of(tmp_path_factory.mktemp("split") / "text", lengths)
    parts = split_documents(file, ratios)
    assert sum(part.num_documents for part in parts) == len(lengths)
    tokens = [part.tokens(0, part.num_tokens).tolist() for part in parts]
    assert sum(tokens, []) == list(range(sum(lengths)))
    ends = set(np.cumsum([0, *lengths]).tolist())
    assert all(part[0] in ends and part[-1] + 1 in ends for part in tokens if part)


def test_a_sample_does_not_leave_its_part(tmp_path: Path) -> None:
    """Field report X16: validation has no token of training, not even the shared last label."""
    file = file_of(tmp_path / "text", [10] * 10)
    train, valid, test = split_documents(file, (8, 1, 1))
    sets = [Samples([part], 3) for part in (train, valid, test)]
    ids = [{int(t) for i in range(len(one)) for t in one.sample(i)} for one in sets]
    assert [len(one) for one in sets] == [26, 3, 3]
    assert [min(one) for one in ids] == [0, 80, 90]
    assert [max(one) for one in ids] == [78, 89, 99]
    assert train.meta is None
    check_vocab([train], 50)
    with pytest.raises(IndexError):
        valid.tokens(0, 11)


def test_a_part_that_is_too_short_is_named(tmp_path: Path) -> None:
    """With its documents, so that a person sees what the split left."""
    file = file_of(tmp_path / "text", [10] * 10)
    parts = split_documents(file, (98, 1, 1))
    with pytest.raises(DataError) as caught:
        Samples([parts[2]], 3)
    words = "text.bin (documents 10 to 10 of 10): 0 tokens, one sample of seq_len 3 needs 4"
    assert words in str(caught.value)
