"""Owns the proof of how token files are cut into samples."""

import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.data.indexed import TokenFile
from rankmesh.data.meta import TokenMeta
from rankmesh.data.order import SampleOrder
from rankmesh.data.prepare import PrepareOptions, prepare
from rankmesh.data.samples import Samples, check_vocab
from rankmesh.data.writer import TokenWriter
from rankmesh.errors import DataError


def token_file(prefix: Path, num_tokens: int, first: int = 0, vocab_size: int = 1000) -> TokenFile:
    """Tokens first, first + 1, ... in documents of 1, 2, 3, ... tokens."""
    tokens = np.arange(first, first + num_tokens)
    with TokenWriter(prefix, vocab_size) as writer:
        length = 1
        while tokens.size:
            writer.add(tokens[:length])
            tokens, length = tokens[length:], length + 1
        writer.commit()
    return TokenFile(prefix)


@given(count=st.integers(1, 12), extra=st.integers(0, 8), seq_len=st.integers(1, 9))
def test_every_target_position_is_used_once(
    tmp_path_factory: pytest.TempPathFactory, count: int, extra: int, seq_len: int
) -> None:
    """N * seq_len + 1 tokens are N samples; a tail of less than seq_len tokens is in none."""
    extra %= seq_len
    path = tmp_path_factory.mktemp("samples") / "text"
    samples = Samples([token_file(path, count * seq_len + 1 + extra)], seq_len)
    assert len(samples) == count
    found = [samples.sample(i) for i in range(count)]
    assert all(sample.dtype == np.int64 and sample.shape == (seq_len + 1,) for sample in found)
    assert np.concatenate([sample[1:] for sample in found]).tolist() == list(
        range(1, count * seq_len + 1)
    )
    assert all(left[-1] == right[0] for left, right in zip(found, found[1:], strict=False))


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    seq_len=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 2**33),
)
def test_no_target_position_comes_twice_in_an_epoch(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    seq_len: int,
    seed: int,
    epoch: int,
) -> None:
    """Field report X02: in any epoch, over several files, each target is used once; those never
    used are a file's first token and its tail of (num_tokens - 1) % seq_len.
    """
    folder = tmp_path_factory.mktemp("epoch")
    sizes = [length + seq_len + 1 for length in lengths]
    starts = np.cumsum([0, *sizes]).tolist()
    files = [token_file(folder / f"{i}", size, starts[i]) for i, size in enumerate(sizes)]
    samples = Samples(files, seq_len)
    order = SampleOrder(seed, len(samples))
    numbers = range(epoch * len(samples), (epoch + 1) * len(samples))
    targets = [int(t) for k in numbers for t in samples.sample(order.index(k))[1:]]
    expected = [
        start + 1 + position
        for start, size in zip(starts, sizes, strict=False)
        for position in range((size - 1) // seq_len * seq_len)
    ]
    assert sorted(targets) == expected


def test_files_are_one_list_that_no_sample_crosses(tmp_path: Path) -> None:
    """Each file's tail stays unused, as if it were alone."""
    sizes = [(9, 0), (5, 100), (12, 200)]
    files = [token_file(tmp_path / str(first), size, first) for size, first in sizes]
    samples = Samples(files, 4)
    expected = [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [100, 101, 102, 103, 104]]
    expected += [[200, 201, 202, 203, 204], [204, 205, 206, 207, 208]]
    assert [samples.sample(i).tolist() for i in range(len(samples))] == expected
    for index in (-1, 5):
        with pytest.raises(IndexError):
            samples.sample(index)


def test_a_sample_is_a_copy(tmp_path: Path) -> None:
    """Changing it changes nothing on disk."""
    samples = Samples([token_file(tmp_path / "text", 9)], 4)
    samples.sample(0)[:] = 77
    assert samples.sample(0).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_tokens", [0, 1, 4])
def test_too_few_tokens_are_refused(tmp_path: Path, num_tokens: int) -> None:
    """Also when another file would do: a file that contributes nothing is a mistake."""
    files = [token_file(tmp_path / "long", 9), token_file(tmp_path / "short", num_tokens)]
    with pytest.raises(DataError) as caught:
        Samples(files, 4)
    assert str(caught.value) == (
        f"{tmp_path}/short.bin: {num_tokens} tokens, one sample of seq_len 4 needs 5"
    )


def test_no_file_and_no_length_are_refused(tmp_path: Path) -> None:
    """In one line each."""
    with pytest.raises(DataError, match="no token files"):
        Samples([], 4)
    with pytest.raises(DataError, match="seq_len is 0"):
        Samples([token_file(tmp_path / "text", 9)], 0)


def test_ids_beyond_the_model_are_found(tmp_path: Path) -> None:
    """At open where the file says what it holds, else when the sample is fetched."""
    known = tmp_path / "in.txt"
    known.write_text("abc")
    prepare(PrepareOptions(inputs=(known,), tokenizer="bytes", out=str(tmp_path / "known")))
    file = TokenFile(tmp_path / "known")
    check_vocab([file], 257)
    with pytest.raises(DataError, match="largest token id 256, the model's vocabulary has 256"):
        check_vocab([file], 256)

    foreign = token_file(tmp_path / "foreign", 9, first=250)
    check_vocab([foreign], 256)
    samples = Samples([foreign], 4, vocab_size=256)
    assert samples.sample(0).tolist() == [250, 251, 252, 253, 254]
    with pytest.raises(DataError, match="token id 258 near token 4, the model's vocabulary has"):
        samples.sample(1)


def test_negative_ids_are_found(tmp_path: Path) -> None:
    """Some programs pad with -1 in int32 files."""
    file = token_file(tmp_path / "text", 9, vocab_size=100_000)
    content = bytearray((tmp_path / "text.bin").read_bytes())
    content[8:12] = struct.pack("<i", -1)
    (tmp_path / "text.bin").write_bytes(bytes(content))
    with pytest.raises(DataError, match="token id -1"):
        Samples([file], 4, vocab_size=100_000).sample(0)


def sparse_file(prefix: Path, num_tokens: int) -> TokenFile:
    """A file of zeros that takes no space on disk, in documents of 2^30 tokens."""
    lengths = [2**30] * (num_tokens // 2**30) + [num_tokens % 2**30]
    offsets = [2 * sum(lengths[:i]) for i in range(len(lengths))]
    with Path(f"{prefix}.bin").open("wb") as stream:
        stream.truncate(2 * num_tokens)
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
        + np.array(lengths, "<i4").tobytes()
        + np.array(offsets, "<i8").tobytes()
        + np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    )
    return TokenFile(prefix)


def test_more_tokens_than_32_bits(tmp_path: Path) -> None:
    """Field report X02: the samples around token 2^32 and the last one lie where they should."""
    num_tokens = 2**32 + 100
    file = sparse_file(tmp_path / "text", num_tokens)
    marks = {2**31 - 5: 1, 2**32 - 5: 2, 2**32 + 85: 3}
    with (tmp_path / "text.bin").open("r+b") as stream:
        for place, value in marks.items():
            stream.seek(2 * place)
            stream.write(struct.pack("<H", value))
    samples = Samples([file, file], 10)
    assert len(samples) == 2 * ((num_tokens - 1) // 10)
    for shift in (0, len(samples) // 2):
        for place, value in marks.items():
            index, column = divmod(place, 10)
            assert samples.sample(shift + index)[column] == value


def test_a_million_samples_cost_nothing(tmp_path: Path) -> None:
    """Opening takes no memory that grows with the file, and a fetch copies one sample."""
    seq_len = 256
    tracemalloc.start()
    samples = Samples([sparse_file(tmp_path / "text", 10**6 * seq_len + 1)], seq_len)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(samples) == 10**6
    assert peak < 2**20
    indices = np.random.default_rng(0).integers(0, len(samples), 1000).tolist()
    start = time.perf_counter()
    for index in indices:
        samples.sample(index)
    # About 10 microseconds each; the limit leaves room for a busy machine.
    assert time.perf_counter() - start < 1.0


def test_meta_without_ids(tmp_path: Path) -> None:
    """A file of empty documents has the largest id -1, which fits any model."""
    meta = TokenMeta(
        tokenizer="bytes",
        tokenizer_sha256="0" * 64,
        vocab_size=257,
        eod_id=256,
        append_eod=False,
        num_documents=1,
        num_tokens=0,
        max_token=-1,
        text_bytes=0,
    )
    with TokenWriter(tmp_path / "text", 257) as writer:
        writer.add([])
        writer.commit(meta)
    check_vocab([TokenFile(tmp_path / "text")], 1)
    assert TokenFile(tmp_path / "text").meta == meta
