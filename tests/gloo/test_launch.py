"""Local launches: how they start, how one failure ends them, and that nothing is left behind."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from rankmesh.comm.failure import Failure
from rankmesh.train.launch import _explain, launch, threads_per_rank, torchrun_line
from tests.gloo.launch_jobs import MODULE

ROOT = Path(__file__).resolve().parents[2]

# torch's launcher leaves the files of its children's streams to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks find the package and the tests; nothing says that a launcher started us."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def descendants(folder: Path) -> list[int]:
    """Processes whose command line or environment names the folder of this test."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in text and int(process.name) != os.getpid():
            found.append(int(process.name))
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that marks all processes of a test; they must be gone at its end."""
    monkeypatch.setenv("RANKMESH_TEST_MARK", str(tmp_path))
    yield tmp_path
    gc.collect()
    deadline = time.monotonic() + 10
    while (left := descendants(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left


def run(mode: str, nproc: int, folder: Path) -> int:
    """One launch from this process."""
    return launch([mode, str(folder)], nproc, folder / "log", module=MODULE, grace_s=5)


def errors(text: str) -> list[str]:
    """The lines that tell of an error."""
    return [line for line in text.splitlines() if line.startswith("rankmesh: error:")]


def test_a_run_that_ends_well(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 is heard, the others are in files; the torchrun line is shown; cores are shared."""
    assert run("fine", 2, folder) == 0
    out, err = capfd.readouterr()
    assert out == "rank 0 speaks\n"
    assert err == (
        "starting 2 ranks, as would: torchrun --standalone --nproc-per-node 2 "
        f"-m {MODULE} fine {folder}\n"
    )
    assert (folder / "log/launch-1/rank-00001.out").read_text() == "rank 1 speaks\n"
    assert {(folder / f"sum-{rank}").read_text() for rank in range(2)} == {"3 1"}
    assert not descendants(folder)


def test_a_second_launch_writes_beside_the_first(folder: Path) -> None:
    """Nothing that is there is written again."""
    for _ in range(2):
        assert run("fine", 1, folder) == 0
    assert [path.name for path in sorted((folder / "log").iterdir())] == ["launch-1", "launch-2"]


def test_the_line_and_the_threads() -> None:
    """What a person would type; and at least one thread for each rank."""
    line = torchrun_line(["train", "a b.toml", "train.steps=3"], 4)
    assert line == (
        "torchrun --standalone --nproc-per-node 4 -m rankmesh train 'a b.toml' train.steps=3"
    )
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(1) == cores and threads_per_rank(10 * cores) == 1


def test_one_failure_ends_all(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Field report U01: rank 1 raises; one rank is in a collective, one asleep, one computing.

    Two of them ignore SIGTERM. All are gone within 10 s, the exit code is 1, and the text of rank
    1 is shown once, on one line; the traceback is in a file.
    """
    code = run("raises", 4, folder)
    assert time.time() - float((folder / "raised").read_text()) < 10
    assert code == 1 and not descendants(folder)
    out, err = capfd.readouterr()
    (line,) = errors(err)
    assert re.match(r"rankmesh: error: rank 1 \(.+\): ValueError: boom on one with a second", line)
    assert (out + err).count("boom on one") == 1 and "Traceback" not in out + err
    trace = Path(line.partition("(traceback: ")[2].rstrip(")"))
    assert "in raises" in trace.read_text() and "boom on one" in trace.read_text()


def test_a_peer_that_fails_second_does_not_hide_the_first(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Field report U01: what peers meet is a reset connection; they say whose fault it was."""
    assert run("raises_first", 3, folder) == 1
    (line,) = errors(capfd.readouterr().err)
    assert "rank 1" in line and "ValueError: boom on one" in line
    for rank in (0, 2):
        path = folder / f"log/launch-1/rank-{rank:05}.error.json"
        # A peer may also be ended by the launcher before it has said anything.
        if path.exists():
            assert "ended because rank 1" in json.loads(path.read_text())["message"]["message"]


def test_a_full_disk_under_the_logs_hides_no_error(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks' records lie elsewhere until the end, and the launcher's own log keeps quiet."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    monkeypatch.setattr("rankmesh.obs.log.QuietFileHandler.flush", full, raising=False)
    monkeypatch.setattr("pathlib.Path.write_text", full)
    assert run("raises", 2, folder) == 1
    _, err = capfd.readouterr()
    (line,) = errors(err)
    assert "ValueError: boom on one" in line and "No space left on device" in line
    assert "Traceback" not in err and "Logging error" not in err


def test_a_user_error_ends_with_2(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One rank alone sees that the input is wrong: one line, exit 2, no traceback."""
    assert run("refuses", 2, folder) == 2
    out, err = capfd.readouterr()
    (line,) = errors(err)
    assert line.endswith("): data.train /nowhere: no such file on this host")
    assert "rank 1 (" in line and "Traceback" not in out + err


def test_a_killed_rank_is_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No exception, no record: the signal is told, with its usual cause."""
    began = time.monotonic()
    assert run("killed", 3, folder) == 1
    assert time.monotonic() - began < 60
    (line,) = errors(capfd.readouterr().err)
    assert "rank 1 was ended by SIGKILL, as the system does when memory runs out" in line


def test_an_exit_without_a_record(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The code and the last words of the rank."""
    assert run("leaves", 2, folder) == 1
    (line,) = errors(capfd.readouterr().err)
    assert "rank 1 ended with exit code 7: something about a library; logs: " in line


def parent(mode: str, nproc: int, folder: Path, grace_s: float = 20.0) -> subprocess.Popen[str]:
    """A process that starts ranks, to be signalled."""
    words = [sys.executable, "-m", MODULE, "parent", str(nproc), str(grace_s), mode, str(folder)]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def ready(folder: Path, nproc: int) -> None:
    """Waits until all ranks run."""
    deadline = time.monotonic() + 90
    while len(list(folder.glob("ready-*"))) < nproc:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all(folder: Path, number: signal.Signals) -> None:
    """Ctrl-C, or a scheduler: ranks and what they started are gone, and the code says why."""
    started = parent("waits", 2, folder)
    ready(folder, 2)
    assert len(descendants(folder)) >= 5
    os.kill(started.pid, number)
    out, err = started.communicate(timeout=20)
    assert started.returncode == 128 + number, err
    assert f"rankmesh: ended by {number.name}" in err and "Traceback" not in out + err
    assert not descendants(folder)


@pytest.mark.slow
def test_a_second_signal_does_not_wait(folder: Path) -> None:
    """Ranks that will not end have their grace; asked twice, they are killed."""
    started = parent("stubborn", 2, folder, grace_s=100)
    ready(folder, 2)
    os.kill(started.pid, signal.SIGINT)
    time.sleep(0.5)
    assert started.poll() is None
    os.kill(started.pid, signal.SIGINT)
    started.communicate(timeout=20)
    assert started.returncode == 128 + signal.SIGINT and not descendants(folder)


@pytest.mark.slow
def test_grace_is_limited(folder: Path) -> None:
    """Once asked, ranks that will not end are killed when their time is over."""
    started = parent("stubborn", 2, folder, grace_s=1)
    ready(folder, 2)
    os.kill(started.pid, signal.SIGTERM)
    started.communicate(timeout=20)
    assert started.returncode == 128 + signal.SIGTERM and not descendants(folder)


@pytest.mark.slow
def test_ranks_do_not_outlive_their_launcher(folder: Path) -> None:
    """The launcher is killed outright: its store is gone, and the ranks end by themselves."""
    started = parent("quiet", 2, folder)
    ready(folder, 2)
    os.kill(started.pid, signal.SIGKILL)
    began = time.monotonic()
    started.communicate(timeout=30)  # ends when the last rank has let go of the streams
    assert time.monotonic() - began < 10 and not descendants(folder)


def test_two_runs_at_once(folder: Path) -> None:
    """Field report U03: nobody chose a port, nobody clashes."""
    places = [folder / name for name in ("a", "b")]
    for place in places:
        place.mkdir()
    started = [parent("fine", 2, place) for place in places]
    ends = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], ends
    assert [out for out, _ in ends] == ["rank 0 speaks\n"] * 2
    assert all((place / "sum-1").read_text().startswith("3 ") for place in places)


@pytest.mark.slow
def test_under_torchrun(folder: Path) -> None:
    """Field report U01 under plain torchrun: its summary names rank 1's error as the root cause."""
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", MODULE]
    done = subprocess.run(
        [sys.executable, "-m", *words, "raises_first", str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    root = done.stderr.partition("Root Cause (first observed failure):")[2]
    assert "rank      : 1 " in root and "ValueError: boom on one" in root
    assert (done.stdout + done.stderr).count("ValueError: boom on one") == 1


def test_slurm_variables_without_an_agent(folder: Path) -> None:
    """Rank 0 keeps the store; the error reaches stderr once though no launcher reads a file."""
    ports = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "2", "SLURM_NODELIST": "localhost"}
    ranks = []
    for rank in ("0", "1"):
        task = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
        words = [sys.executable, "-m", MODULE, "raises_first", str(folder)]
        environment = {**os.environ, **ports, **task, "GLOO_SOCKET_IFNAME": "lo"}
        ranks.append(subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment))
    texts = [process.communicate(timeout=90)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1]
    assert len(errors(texts[1])) == 1 and "ValueError: boom on one" in texts[1]
    assert not errors(texts[0]) and "boom on one" not in texts[0]


@pytest.mark.slow
def test_slurm_variables_and_a_good_end(folder: Path) -> None:
    """The keeper of the store leaves last."""
    ports = {"SLURM_JOB_ID": str(os.getpid() + 1), "SLURM_NTASKS": "2"}
    ranks = []
    for rank in ("0", "1"):
        task = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODELIST": "localhost"}
        environment = {**os.environ, **ports, **task, "GLOO_SOCKET_IFNAME": "lo"}
        words = [sys.executable, "-m", MODULE, "fine", str(folder)]
        ranks.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, env=environment))
    assert [process.wait(timeout=90) for process in ranks] == [0, 0]
    assert (folder / "sum-0").read_text().startswith("3 ")


def test_who_was_ended_from_outside_is_named(tmp_path: Path) -> None:
    """The agent ends the others by the same signal."""
    gone = str(tmp_path / "none")
    failures = {rank: ProcessFailure(rank, 9, -signal.SIGTERM, gone) for rank in (2, 0, 1)}
    said, code = _explain(failures, tmp_path)
    assert said.startswith("rank 2 was ended by SIGTERM, from outside; logs:") and code == 1


def test_who_did_not_answer_is_named(tmp_path: Path) -> None:
    """A rank that hangs for good is killed by the agent, long after the others' time-out: their
    line counts, and it is no lack of memory.
    """
    text = "RECV_F (stage 2, microbatch 1) from pipeline rank 1 failed: Timed out waiting 8000ms"
    failure = Failure(2, "here", "MeshError", text, 1, 1.0, known=True, by_peer=True)
    record = tmp_path / "rank-00002.error.json"
    message = {"rankmesh": asdict(failure), "message": text, "extraInfo": {"timestamp": "1"}}
    record.write_text(json.dumps({"message": message}))
    failures = {
        1: ProcessFailure(1, 11, -signal.SIGKILL, str(tmp_path / "none")),
        2: ProcessFailure(2, 12, 1, str(record)),
    }
    said, code = _explain(failures, tmp_path)
    assert said == f"rank 2 (here): {text}; rank 1 did not answer and was killed"
    assert code == 1
