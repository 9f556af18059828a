"""Owns the proof that an interrupted `prepare` goes on where it stopped, to the same bytes."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rankmesh.data import blocks, prepare
from rankmesh.data.indexed import TokenFile
from rankmesh.data.prepare import Prepared, PrepareOptions, Progress
from rankmesh.data.unfinished import Unfinished
from rankmesh.errors import DataError


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks out of little text, each recorded."""
    monkeypatch.setattr(blocks, "BLOCK", 60)
    monkeypatch.setattr(prepare, "RECORD_S", 0.0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three inputs, of 20 documents each, of which some are bad."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "abc":
        rows = [json.dumps({"text": f"{name}{i} " * (i % 9)}) for i in range(20)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return folder


def run(
    source: Path,
    at: int | None = None,
    stop: type[BaseException] = KeyboardInterrupt,
    **changes: object,
) -> Prepared:
    """One attempt; it is stopped after block number `at`."""
    seen = 0

    def report(progress: Progress) -> None:
        nonlocal seen
        seen += 1
        if at is not None and seen > at:
            raise stop("stopped")

    fields = {
        "inputs": (source,),
        "tokenizer": "bytes",
        "out": str(source.parent / "out"),
        "workers": 0,
    }
    return prepare.prepare(PrepareOptions(**{**fields, **changes}), report)  # type: ignore[arg-type]


def files(folder: Path) -> dict[str, bytes]:
    """What was written, and nothing else lies there."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert not list(folder.glob(".*"))
    return found


@pytest.fixture
def expected(source: Path, tmp_path: Path) -> dict[str, bytes]:
    """The files of a job that nobody stopped."""
    run(source)
    found = files(tmp_path)
    for name in found:
        (tmp_path / name).unlink()
    return found


def kept(tmp_path: Path) -> Path:
    return tmp_path / ".out.unfinished"


def test_it_goes_on_after_any_block(
    source: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """Nothing is read or encoded twice, statistics included; no file appears before the end."""
    total = run(source).meta.num_documents
    for name in expected:
        (tmp_path / name).unlink()
    for at in range(0, 20, 3):
        with pytest.raises(KeyboardInterrupt):
            run(source, at)
        assert not list(tmp_path.glob("out.*"))
        done = run(source)
        assert files(tmp_path) == expected
        assert 0 < done.progress.resumed.documents < total
        assert done.meta.num_documents == total
        for name in expected:
            (tmp_path / name).unlink()


def test_it_goes_on_again_and_again(
    source: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """One block an attempt."""
    attempts = 0
    while attempts < 100:
        try:
            run(source, 0)
            break
        except KeyboardInterrupt:
            attempts += 1
    assert attempts > 20
    assert files(tmp_path) == expected


def test_a_killed_job_goes_on_at_its_last_record(
    source: Path, tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report X18: nothing is tidied up; the parts reach beyond the journal, or the journal
    has a torn last line.
    """
    with monkeypatch.context() as patch:
        patch.setattr(prepare._Job, "_leave", lambda self, error: self._unfinished.close() or 0)
        with pytest.raises(KeyboardInterrupt):
            run(source, 9)
    folder = kept(tmp_path)
    with (folder / "ids").open("ab") as stream:
        stream.write(b"beyond")
    journal = (folder / "journal.jsonl").read_bytes()
    assert journal.count(b"\n") == 10
    (folder / "journal.jsonl").write_bytes(journal[:-20])
    done = run(source)
    assert done.progress.resumed.documents == json.loads(journal.splitlines()[8])["documents"]
    assert files(tmp_path) == expected


def lose_parts(folder: Path) -> None:
    os.truncate(folder / "ids", 3)


def lose_lengths(folder: Path) -> None:
    (folder / "lengths").unlink()


def lose_journal(folder: Path) -> None:
    (folder / "journal.jsonl").unlink()


def lose_job(folder: Path) -> None:
    (folder / "job.json").unlink()


def break_job(folder: Path) -> None:
    (folder / "job.json").write_text("{")


def break_journal(folder: Path) -> None:
    (folder / "journal.jsonl").write_text('{"position": 3}\n[]\n')


@pytest.mark.parametrize(
    "damage", [lose_parts, lose_lengths, lose_journal, lose_job, break_job, break_journal]
)
def test_what_cannot_be_gone_on_with_starts_anew(
    source: Path, tmp_path: Path, expected: dict[str, bytes], damage: Callable[[Path], None]
) -> None:
    """Never half of one job and half of another."""
    with pytest.raises(KeyboardInterrupt):
        run(source, 9)
    damage(kept(tmp_path))
    assert run(source).progress.resumed.documents == 0
    assert files(tmp_path) == expected


@pytest.mark.parametrize(
    "changes",
    [{"append_eod": False}, {"jsonl_key": "body"}, {"kind": "text"}, {"strict": True}],
    ids=str,
)
def test_another_job_starts_anew(source: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    """With other options the same inputs are other tokens."""
    with pytest.raises(KeyboardInterrupt):
        run(source, 9)
    if changes.keys() & {"jsonl_key", "strict"}:
        with pytest.raises(DataError):
            run(source, **changes)
    else:
        done = run(source, **changes)
        assert done.progress.resumed.documents == 0


def test_inputs_that_changed_behind_the_record(source: Path, tmp_path: Path) -> None:
    """What was done of the inputs before them is kept; of a changed one nothing is."""
    with pytest.raises(KeyboardInterrupt):
        run(source, 14)
    with (source / "b.jsonl").open("a") as stream:
        stream.write('\n{"text": "new"}\n')
    (source / "c.jsonl").write_text('{"text": "other"}\n')
    shutil.copytree(source, tmp_path / "fresh" / "in")
    done = run(source)
    run(tmp_path / "fresh" / "in")
    # Those of a.jsonl: texts of i % 9 = 0 words are empty.
    assert done.progress.resumed.documents == 17
    assert files(tmp_path) == files(tmp_path / "fresh")


def test_inputs_that_are_gone(source: Path, tmp_path: Path) -> None:
    """The first one counts from the start, the others keep their order."""
    with pytest.raises(KeyboardInterrupt):
        run(source, 14)
    (source / "c.jsonl").unlink()
    assert run(source).progress.resumed.documents > 17
    with pytest.raises(KeyboardInterrupt):
        run(source, 9)
    (source / "a.jsonl").unlink()
    assert run(source).progress.resumed.documents == 0
    assert TokenFile(tmp_path / "out").num_documents == 17


def test_a_strict_job_goes_on_once_the_fault_is_mended(source: Path, tmp_path: Path) -> None:
    """Hours of work before one bad line are not lost."""
    good = [json.dumps({"text": f"{i} " * 30}) for i in range(20)]
    for name in "abc":
        (source / f"{name}.jsonl").write_text("\n".join(good))
    (source / "c.jsonl").write_text("\n".join([*good, "{"]))
    with pytest.raises(DataError, match="c.jsonl:21: broken JSON"):
        run(source, strict=True)
    (source / "c.jsonl").write_text("\n".join(good))
    assert run(source, strict=True).progress.resumed.documents >= 40
    assert TokenFile(tmp_path / "out").num_documents == 60


def test_a_full_disk_keeps_what_was_recorded(
    source: Path, tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the output, and the job goes on when there is room."""
    calls = 0
    append = Unfinished.append

    def full(self: Unfinished, *parts: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 8:
            raise OSError(28, "No space left on device")
        append(self, *parts)  # type: ignore[arg-type]

    monkeypatch.setattr(Unfinished, "append", full)
    with pytest.raises(DataError, match="out: cannot be written: No space left on device"):
        run(source)
    monkeypatch.undo()
    assert run(source).progress.resumed.documents > 0
    assert files(tmp_path) == expected


def test_one_job_at_a_time(source: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    """Two that write one prefix would mix; the second is told, and the first ends undisturbed."""
    other = Unfinished(tmp_path / "out")
    with pytest.raises(DataError, match="another `prepare` is writing it"):
        run(source)
    other.remove()
    run(source)
    assert files(tmp_path) == expected


def test_an_early_fault_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What took no time is not worth a folder."""
    monkeypatch.setattr(prepare, "RECORD_S", 60.0)
    with pytest.raises(DataError, match="stopped"):
        run(source, 9, DataError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
