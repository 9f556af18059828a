"""Stopping and going on over Gloo: bit for bit, also where a run was killed while it saved."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rankmesh.checkpoint.shelf import complete, shelf, step_folder
from rankmesh.checkpoint.weights import Weights
from rankmesh.obs.metrics import read_metrics
from rankmesh.obs.rundir import log_folder, metrics_path, read_launches, read_status
from rankmesh.testing.spawn import Pool
from tests import runs

ROOT = Path(__file__).resolve().parents[2]
JOBS = "tests.gloo.resume_jobs"
MESH = ["parallel.tp=2", "parallel.dp=2"]
CHANGES = [
    "optimizer.schedule=cosine", "optimizer.decay_steps=20", "optimizer.warmup_steps=3",
    "model.dropout=0.1", "optimizer.clip_grad=0.5", "data.valid=[]", "train.global_batch_size=5",
]  # fmt: skip
AUTO = "train.resume=auto"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_config(tmp_path_factory.mktemp("resume"))


def job(pool: Pool, config: Path, name: str, steps: int, more: Sequence[str] = ()) -> list[int]:
    """Train up to `steps` on 4 ranks; returns the samples of both replicas' first ranks."""
    overrides = [*CHANGES, *MESH, *more, f"train.steps={steps}", AUTO]
    overrides.append(f"log.run_dir={config.parent / name}")
    fed = pool.run(f"{JOBS}:run", 4, timeout=120, config=str(config), overrides=overrides)
    assert fed[0] == fed[1] and fed[2] == fed[3]
    return [*fed[0], *fed[2]]


@pytest.fixture(scope="module")
def straight(pool: Pool, config: Path) -> tuple[Path, list[int]]:
    """20 steps without a stop, and the samples that they read."""
    fed = job(pool, config, "straight", 20)
    return config.parent / "straight", fed


def assert_as_unbroken(broken: Path, straight: Path, step: int) -> None:
    """Figures of every step, and every bit of weights, moments and step counts."""
    for name in ("loss", "grad_norm", "lr"):
        theirs = runs.figures(straight, name)
        expected = {number: theirs[number] for number in range(1, step + 1)}
        assert runs.figures(broken, name) == expected
    ours, theirs = (runs.contents(step_folder(folder, step)) for folder in (broken, straight))
    assert ours == theirs


def test_a_stopped_mesh_ends_as_an_unbroken_one(
    pool: Pool, config: Path, straight: tuple[Path, list[int]]
) -> None:
    """Field reports K03, K07 and L02 on tp 2 x dp 2: 20 steps against stops at 7 and 13."""
    fed: list[int] = []
    for steps in (7, 13, 20):
        fed += job(pool, config, "broken", steps)
    assert sorted(fed) == sorted(straight[1]) == list(range(100))
    assert_as_unbroken(config.parent / "broken", straight[0], 20)


def test_each_element_is_written_once(straight: tuple[Path, list[int]]) -> None:
    """All four ranks write, about as much each; the files hold the model and nothing twice."""
    folder = step_folder(straight[0], 20)
    manifest = Weights(folder).manifest
    sizes = sorted(entry.bytes for entry in manifest.files.values())
    assert len(sizes) == 4 and sizes[-1] < 2 * sizes[0]
    elements = 3 * 21240 + 21  # weights and two moments; a step count for each parameter
    pieces = [piece for entry in manifest.tensors.values() for piece in entry.pieces]
    assert sum(piece.bytes[1] - piece.bytes[0] for piece in pieces) == 4 * elements
    Weights(folder).verify()


def test_another_mesh_reads_it(config: Path, straight: tuple[Path, list[int]]) -> None:
    """The writing mesh leaves no mark on what can read: one process goes on from four ranks'."""
    branch = config.parent / "branch"
    given = [f"log.run_dir={branch}", "train.steps=21", f"train.resume={straight[0]}"]
    runs.train_alone(config, [*CHANGES, *given])
    text = (log_folder(branch) / "rank-00000.log").read_text()
    assert "resume: parallel.tp: 2 -> 1" in text and "resume: parallel.dp: 2 -> (not given)" in text
    assert read_metrics(metrics_path(branch))[0]["step"] == 21


def rankmesh(config: Path, name: str, steps: int) -> subprocess.CompletedProcess[str]:
    """`rankmesh train` in a process of its own, which starts four more."""
    words = ["train", str(config), *CHANGES, *MESH, f"train.steps={steps}", AUTO]
    words.append(f"log.run_dir={config.parent / name}")
    return subprocess.run(
        [sys.executable, "-m", "rankmesh", *words],
        capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip


@pytest.mark.slow
def test_the_command_goes_on(config: Path, straight: tuple[Path, list[int]]) -> None:
    """Field reports K03 and L02, as a user types it: `rankmesh train` to 7, 13 and 20."""
    for steps in (7, 13, 20):
        done = rankmesh(config, "typed", steps)
        assert done.returncode == 0, done.stderr
    assert "resumes after step 13, 65 samples, from " in done.stdout
    assert "warning: resume: train.steps: 13 -> 20\n" in done.stdout
    folder = config.parent / "typed"
    assert_as_unbroken(folder, straight[0], 20)
    assert [launch["attempt"] for launch in read_launches(folder)] == [1, 2, 3]
    assert read_status(folder)["state"] == "done"


class Deaths:
    """Runs of two ranks that die in the save of step 4, having saved step 2; then a resume."""

    def __init__(self, pool: Pool, config: Path) -> None:
        self.pool, self.config = pool, config
        changes = ["checkpoint.every=2", "checkpoint.keep=1", *CHANGES, "parallel.dp=2", AUTO]
        self.given = {"config": str(config), "overrides": changes}
        self.base = self._folder("base")
        self.run("run", "base", 2)
        self.straight = self.copy("deaths-straight")
        self.moments = self.run("count", "deaths-straight", 6, step=4)

    def _folder(self, name: str) -> Path:
        return self.config.parent / name

    def copy(self, name: str) -> Path:
        """A run folder in which step 2 is done."""
        shutil.copytree(self.base, self._folder(name))
        return self._folder(name)

    def words(self, name: str, steps: int) -> dict[str, object]:
        more = [f"log.run_dir={self._folder(name)}", f"train.steps={steps}"]
        return {**self.given, "overrides": [*self.given["overrides"], *more]}

    def run(self, how: str, name: str, steps: int, **more: object) -> list[int]:
        return self.pool.run(f"{JOBS}:{how}", 2, timeout=60, **more, **self.words(name, steps))

    def fail(self, how: str, name: str, **more: object) -> str:
        """What all ranks said when they died."""
        return self.pool.fail(f"{JOBS}:{how}", 2, timeout=60, **more, **self.words(name, 6))[1]

    def check(self, name: str) -> None:
        """The newest complete checkpoint is whole; from it the run ends as an unbroken one."""
        folder = self._folder(name)
        newest = complete(shelf(folder))[-1]
        Weights(newest).verify()
        self.run("run", name, 6)
        text = (log_folder(folder) / "rank-00000.log").read_text()
        assert f"resumes after step {int(newest.name[5:])}, " in text
        left = [path.name for path in shelf(folder).iterdir()]
        assert left == ["step-00000006"]
        assert_as_unbroken(folder, self.straight, 6)


@pytest.fixture(scope="module")
def deaths(pool: Pool, config: Path) -> Deaths:
    return Deaths(pool, config)


@pytest.mark.parametrize("share", [0.0, 0.5, pytest.param(0.3, marks=pytest.mark.slow)])
def test_killed_while_it_writes(deaths: Deaths, share: float) -> None:
    """Field report K01: all ranks killed before any byte, or between two tensors. `auto` goes on
    from the save before, names what it skips, and ends as an unbroken run.
    """
    name = f"write-{share}"
    deaths.copy(name)
    moment = 2 + int(share * (deaths.moments[0] - 8))
    deaths.fail("die", name, step=4, moment=moment, rank=0, alone=False)
    assert [path.name for path in complete(shelf(deaths.base.parent / name))] == ["step-00000002"]
    deaths.check(name)
    text = (log_folder(deaths.base.parent / name) / "rank-00000.log").read_text()
    assert ".step-00000004.partial: no complete checkpoint, skipped and removed" in text


@pytest.mark.parametrize(
    "before_last", [3, 0, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 4, 2, 1))]
)
def test_killed_while_it_commits(deaths: Deaths, before_last: int) -> None:
    """Field report K01 in the last moments: manifest, syncs, the rename, the removal of the old."""
    name = f"commit-{before_last}"
    deaths.copy(name)
    moment = deaths.moments[0] - before_last
    deaths.fail("die", name, step=4, moment=moment, rank=0, alone=False)
    deaths.check(name)


def test_one_rank_killed(deaths: Deaths) -> None:
    """Field report K01: only rank 1 dies, while rank 0 waits for it; nothing is committed."""
    deaths.copy("one")
    deaths.fail("die", "one", step=4, moment=5, rank=1, alone=True)
    assert [path.name for path in complete(shelf(deaths.base.parent / "one"))] == ["step-00000002"]
    deaths.check("one")


def test_a_full_disk(deaths: Deaths) -> None:
    """Field reports K01 and K18: rank 1 cannot write; its words name the file and the reason, the
    save before is untouched, and with room again the run goes on.
    """
    folder = deaths.copy("full")
    text = deaths.fail("full_disk", "full", step=4, rank=1)
    expected = f"{shelf(folder)}/.step-00000004.partial: cannot be written: No space left on device"
    assert f"CheckpointError: {expected}" in text
    assert [path.name for path in complete(shelf(folder))] == ["step-00000002"]
    deaths.check("full")


@pytest.mark.slow
def test_the_command_is_killed_and_goes_on(config: Path, straight: tuple[Path, list[int]]) -> None:
    """Field report K01 from outside: SIGKILL at a moment that nobody chose, with a save each step;
    the same command again ends as if nothing had been.
    """
    name = "shot"
    words = ["train", str(config), *CHANGES, *MESH, "train.steps=20", "checkpoint.every=1"]
    words += ["checkpoint.keep=2", AUTO, f"log.run_dir={config.parent / name}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "rankmesh", *words]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        deadline = time.monotonic() + 120
        while len(complete(shelf(config.parent / name))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        launch = read_launches(config.parent / name)[0]
        for pid in [rank["pid"] for rank in launch["ranks"]]:
            os.kill(pid, signal.SIGKILL)
        process.wait(timeout=60)
    assert process.returncode == 1
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "resumes after step" in done.stdout
    assert_as_unbroken(config.parent / name, straight[0], 20)
