"""Owns the proof that workers change the time and nothing else, and that none can vanish unseen."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from rankmesh.cli.main import main
from rankmesh.data import blocks, crew
from rankmesh.data.blocks import Block, read_blocks
from rankmesh.data.crew import Crew
from rankmesh.data.encode import EncodeOptions
from rankmesh.data.indexed import TokenFile
from rankmesh.data.inputs import find_inputs
from rankmesh.data.prepare import PrepareOptions, Progress, prepare
from rankmesh.data.tokenizer import train_bpe
from rankmesh.errors import DataError, RankmeshError

BAD = (
    b'{"text": "\xff\xfe"}',
    b'{"text": "unfinished',
    b'{"text": "a\\u0000b"}',
    b'{"text": "a\\ud800b"}',
    b'["text"]',
    b'{"body": "x"}',
    b'{"text": ""}',
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks out of little text."""
    monkeypatch.setattr(blocks, "BLOCK", 2_000)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of every kind of input, with bad documents among the good, and a tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [f"document {i}: " + "the cat sat on the mat, " * (i * 7 % 23) for i in range(240)]
    rows = [json.dumps({"text": text}).encode() for text in texts]
    for i, bad in enumerate(BAD):
        rows.insert(20 + 25 * i, bad)
    (folder / "a.jsonl").write_bytes(b"\n".join(rows[:90]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(rows[90:170])))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(b"\n".join(rows[170:])))
    pq.write_table(pa.table({"text": [*texts[:50], None, ""]}), folder / "d.parquet")
    for i in range(30):
        (folder / f"e{i:02}.txt").write_text(texts[i])
    (folder / "f.txt").write_bytes(b"good\n\xff")
    train_bpe(texts, 400, folder / ".tokenizer.json")
    return folder


def written(prefix: Path) -> dict[str, bytes]:
    """The three files, by ending."""
    return {end: Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx", "meta.json")}


def options(corpus: Path, out: Path, **changes: object) -> PrepareOptions:
    """Everything in the corpus, with its own tokenizer."""
    fields = {"inputs": (corpus,), "tokenizer": str(corpus / ".tokenizer.json"), "out": str(out)}
    return PrepareOptions(**{**fields, **changes})  # type: ignore[arg-type]


def test_any_number_of_workers_writes_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    """Field report X18: 0, 1 and 4 workers, bad lines and all; the blocks do not matter either."""
    expected = prepare(options(corpus, tmp_path / "0", workers=0))
    files = written(tmp_path / "0")
    assert expected.meta.num_documents == 240 + 50 + 30
    assert sum(expected.meta.skipped.values()) == len(BAD) + 2 + 1
    for workers in (1, 4):
        done = prepare(options(corpus, tmp_path / f"{workers}", workers=workers))
        assert written(tmp_path / f"{workers}") == files
        assert done.progress.tally == expected.progress.tally
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", 1 << 20)
        prepare(options(corpus, tmp_path / "whole", workers=0))
    assert written(tmp_path / "whole") == files


def test_progress_is_reported_in_order(corpus: Path, tmp_path: Path) -> None:
    """It rises to the end, and the time left falls to 0."""
    seen: list[Progress] = []
    prepare(options(corpus, tmp_path / "out", workers=2), seen.append)
    assert len(seen) > 20
    read = [one.tally.read for one in seen]
    assert read == sorted(read) and read[-1] == seen[-1].total
    assert seen[-1].seconds_left == 0 and all((one.seconds_left or 0) >= 0 for one in seen)


def test_strict_names_the_first_bad_document(corpus: Path, tmp_path: Path) -> None:
    """Field report X18: the first in the order of the inputs, whoever met one first."""
    messages = set()
    for workers in (0, 3):
        with pytest.raises(DataError) as caught:
            prepare(options(corpus, tmp_path / "out", workers=workers, strict=True))
        messages.add(str(caught.value))
        assert list(tmp_path.iterdir()) == []
    assert messages == {f"{corpus}/a.jsonl:21: invalid UTF-8"}


def test_what_is_wrong_with_the_tokenizer_is_the_users_fault(corpus: Path, tmp_path: Path) -> None:
    """Found in a worker, said here, in one line."""
    for changes in ({"tokenizer": "gone.json"}, {"tokenizer": "bytes", "prepend_bos": True}):
        with pytest.raises(DataError) as caught:
            prepare(options(corpus, tmp_path / "out", workers=2, **changes))
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="--workers -1: expected 0 or more"):
        prepare(options(corpus, tmp_path / "out", workers=-1))


def text_blocks(folder: Path, count: int) -> Iterator[Block]:
    """Blocks of one small document each."""
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} " * 700}) + "\n" for i in range(count)))
    return read_blocks(find_inputs([path]), "text")


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_worker_that_dies_ends_the_job(tmp_path: Path, num_workers: int) -> None:
    """Field report X18: with how it ended and where; nobody waits for it."""
    with (
        pytest.raises(RankmeshError, match=r"a worker was killed by SIGKILL .* at .*in.jsonl:\d+$"),
        Crew(EncodeOptions(tokenizer="bytes"), num_workers) as workers,
    ):
        for number, _ in enumerate(workers.encode(text_blocks(tmp_path, 60))):
            if number == 5:
                workers._workers[0].kill()


def test_a_worker_that_cannot_start_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken installation, or no memory left."""
    monkeypatch.setattr(crew, "_COMMAND", (sys.executable, "-c", "raise SystemExit(7)"))
    with pytest.raises(RankmeshError, match="a worker ended with exit code 7 at its start"):
        Crew(EncodeOptions(tokenizer="bytes"), 2).__enter__()
    monkeypatch.setattr(crew, "_COMMAND", ("no such program",))
    with pytest.raises(RankmeshError, match="a worker cannot be started"):
        Crew(EncodeOptions(tokenizer="bytes"), 2).__enter__()


def test_only_some_blocks_are_read_ahead(tmp_path: Path) -> None:
    """Memory is bounded however far the reading could run ahead of the writing."""
    read = 0

    def counted() -> Iterator[Block]:
        nonlocal read
        for block in text_blocks(tmp_path, 60):
            read += 1
            yield block

    with Crew(EncodeOptions(tokenizer="bytes"), 2) as workers:
        for done, _ in enumerate(workers.encode(counted()), start=1):
            assert read - done <= 2 * 4 + 1
    assert read == done > 30


def command(corpus: Path, out: Path, *words: str) -> list[str]:
    tokenizer = str(corpus / ".tokenizer.json")
    start = [sys.executable, "-m", "rankmesh", "prepare", str(corpus), "--tokenizer", tokenizer]
    return [*start, "--out", str(out), *words]


def children(pid: int) -> list[int]:
    """Processes that a process started."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(condition: object) -> None:
    """Polls for at most 60 seconds."""
    assert callable(condition)
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def large(folder: Path) -> Path:
    """Enough text for a job that is not over before it is interrupted."""
    folder.mkdir()
    row = json.dumps({"text": "the cat sat on the mat " * 200}) + "\n"
    (folder / "large.jsonl").write_text(row * 20_000)
    return folder


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_job_leaves_no_worker_behind(
    corpus: Path, tmp_path: Path, signal_number: int
) -> None:
    """Ctrl-C, and the kernel's own way: the workers end by themselves."""
    words = command(corpus, tmp_path / "out", "--workers", "2", str(large(tmp_path / "more")))
    # A session of its own, as a terminal has: the signal goes to the one process.
    with subprocess.Popen(words, stderr=subprocess.PIPE, start_new_session=True) as process:
        wait_for(lambda: len(children(process.pid)) == 2)
        workers = children(process.pid)
        wait_for(lambda: (tmp_path / ".out.unfinished" / "job.json").exists())
        process.send_signal(signal_number)
        assert process.wait(60) == (130 if signal_number == signal.SIGINT else -9)
        wait_for(lambda: not any(_runs(worker) for worker in workers))
        assert process.stderr is not None
        text = process.stderr.read().decode()
    assert "Traceback" not in text
    assert not (tmp_path / "out.idx").exists()


def _runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_worker_is_an_error_of_the_command(corpus: Path, tmp_path: Path) -> None:
    """Field report X18: one line, exit code 1, and the work is kept; the command then ends it."""
    words = command(corpus, tmp_path / "out", "--workers", "2", str(large(tmp_path / "more")))
    with subprocess.Popen(words, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        wait_for(lambda: len(children(process.pid)) == 2)
        wait_for(lambda: (tmp_path / ".out.unfinished" / "ids").exists())
        wait_for(lambda: (tmp_path / ".out.unfinished" / "ids").stat().st_size > 0)
        os.kill(children(process.pid)[0], signal.SIGKILL)
        text = process.stderr.read().decode()
        assert process.wait(60) == 1
    assert "rankmesh: error: a worker was killed by SIGKILL" in text and "Traceback" not in text
    assert "documents are kept: the same command goes on from there" in text
    (tmp_path / "more" / "large.jsonl").write_text("")
    assert main(words[3:]) == 0
    assert TokenFile(tmp_path / "out").num_documents == 320
