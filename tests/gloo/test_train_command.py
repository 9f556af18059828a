"""`python -m rankmesh train` from outside: files, exit codes, and what a fault of one rank does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rankmesh.cli.main import main
from rankmesh.config.load import load_config
from rankmesh.obs.metrics import read_metrics
from rankmesh.obs.rundir import read_launches, read_status
from tests import runs

ROOT = Path(__file__).resolve().parents[2]
MARK = "RANKMESH_TEST_MARK"

# Put on the path as `sitecustomize`, so that rank 1 starts with a fault in step 3.
FAULT = """
import os, time

def strike(*args, **options):
    with open({stamp!r}, "w") as file:
        file.write(str(time.time()))
    {deed}

if os.environ.get("RANK") == "1":
    from rankmesh.train import loop, save

    def arm(run, place):
        if place == "forward":
            run.parallel.chunks[0].model.norm.register_forward_pre_hook(strike)
        elif place == "backward":
            run.buffers.slots[1]._deposited = strike
        elif place == "gradient":
            slot = run.buffers.slots[1]
            plain = slot._deposited
            def deposited():
                slot.grad.view(-1)[0] = float("nan")
                plain()
            slot._deposited = deposited

    def step(run, number, batches, **options):
        if number == 3:
            arm(run, {place!r})
        return plain_step(run, number, batches, **options)

    loads = []

    def load(self, consumed):
        if self.end is None:
            loads.append(consumed)
        return strike() if len(loads) == 3 and {place!r} == "loader" else plain_load(self, consumed)

    plain_step, loop.train_step = loop.train_step, step
    plain_load, loop.Loader.at = loop.Loader.at, load
    if {place!r} == "save":
        save.write_weights = strike
"""


def surroundings(folder: Path, *first: Path) -> dict[str, str]:
    """The environment of a user's shell, marked with the folder of the test."""
    launch = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    env = {name: value for name, value in os.environ.items() if name not in launch}
    path = ":".join(map(str, (*first, ROOT / "src")))
    return env | {"PYTHONPATH": path, MARK: str(folder), "OMP_NUM_THREADS": "1"}


def left_of(folder: Path) -> list[str]:
    """Command lines of the processes that carry the folder's mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def command(
    config: Path, changes: Sequence[str], *first: Path, **variables: str
) -> subprocess.Popen[str]:
    """A run that has begun. first: folders before ours on Python's path."""
    return subprocess.Popen(
        [sys.executable, "-m", "rankmesh", "train", str(config), *changes],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=surroundings(config.parent, *first) | variables,
        cwd=config.parent,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, str]]:
    """A run of tp 2 x dp 2 that has ended well: its folder, stdout and stderr."""
    config = runs.write_config(tmp_path_factory.mktemp("finished"))
    process = command(config, ["parallel.tp=2", "parallel.dp=2", "train.eval_every=3"])
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    yield config.parent / "run", out, err
    assert left_of(config.parent) == []


METRICS = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "step_time_s",
           "peak_memory_bytes", "comm_bytes"}  # fmt: skip


@pytest.mark.slow
def test_the_files_of_a_run(finished: tuple[Path, str, str]) -> None:
    """Config, rank map, figures, status, logs and weights: complete, and nothing half-written."""
    folder, _, _ = finished
    config = load_config(folder / "config.toml")
    assert (config.parallel.tp, config.parallel.dp, config.train.eval_every) == (2, 2, 3)
    status = read_status(folder)
    assert (status["state"], status["step"], status["total_steps"]) == ("done", 6, 6)
    assert status["error"] is None
    (launch,) = read_launches(folder)
    assert launch["attempt"] == 1 and launch["world_size"] == 4
    ranks = launch["ranks"]
    places = [(rank["coordinate"]["tp"], rank["coordinate"]["dp"]) for rank in ranks]
    assert places == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert len({rank["pid"] for rank in ranks}) == 4 and {r["device"] for r in ranks} == {"cpu"}
    steps = read_metrics(folder / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step["step"] for step in steps if "eval_loss" in step] == [3, 6]
    for step in steps:
        assert set(step) >= METRICS
        assert set(step["comm_bytes"]) == {"tp", "dp_cp", "world"}
        assert step["tokens"] == 6 * runs.SEQ_LEN and step["mfu"] is None
    assert sorted(path.name for path in (folder / "log").glob("*.log")) == [
        f"rank-{rank:05}.log" for rank in range(4)
    ]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000006"]
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")]


@pytest.mark.slow
def test_what_a_person_sees(finished: tuple[Path, str, str]) -> None:
    """A line a step, from one rank; the torchrun line that the command stands for."""
    _, out, err = finished
    for number in range(1, 7):
        assert out.count(f"step {number}/6 ") == 1
    assert err.count("torchrun --standalone --nproc-per-node 4 -m rankmesh train") == 1
    assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_the_mesh_equals_one_process(finished: tuple[Path, str, str], tmp_path: Path) -> None:
    """The same command on one rank: losses and evaluations equal to 1e-5, tokens equal."""
    config = runs.write_config(tmp_path)
    assert main(["train", str(config), "train.eval_every=3"]) == 0
    alone = read_metrics(tmp_path / "run" / "metrics.jsonl")
    mesh = read_metrics(finished[0] / "metrics.jsonl")
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert [step[key] for step in mesh] == pytest.approx([s[key] for s in alone], rel=1e-5)
    assert mesh[-1]["eval_loss"] == pytest.approx(alone[-1]["eval_loss"], rel=1e-5)
    assert all(step["comm_bytes"] == {} for step in alone)


@pytest.mark.slow
def test_text_from_a_run(
    finished: tuple[Path, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """`rankmesh generate RUN_DIR` finds the weights and the tokenizer that the run left there."""
    words = ["generate", str(finished[0]), "--prompt", "rank", "--max-new-tokens", "5", "--json"]
    texts = []
    for seed in (1, 1, 2, 3):
        assert main([*words, "--seed", str(seed)]) == 0
        texts.append(json.loads(capsys.readouterr().out))
    assert texts[0] == texts[1] and len({tuple(text["tokens"]) for text in texts}) > 1
    for text in texts:
        assert text["text"].startswith("rank") and len(text["tokens"]) <= 5


def test_a_run_repeats_itself(tmp_path: Path) -> None:
    """The same config twice: every loss, norm and evaluation bit for bit; and so the weights."""
    config = runs.write_config(tmp_path)
    found: list[Any] = []
    for name in ("a", "b"):
        changes = [f"log.run_dir={tmp_path / name}", "model.dropout=0.1", "train.eval_every=2"]
        assert main(["train", str(config), *changes]) == 0
        steps = read_metrics(tmp_path / name / "metrics.jsonl")
        weights = tmp_path / name / "checkpoints" / "step-00000006" / "data-00000.safetensors"
        keys = ("loss", "grad_norm", "eval_loss")
        found.append(([[step.get(key) for key in keys] for step in steps], weights.read_bytes()))
    assert found[0] == found[1]


BAD = [
    (["train.stepz=3"], "train.steps"),
    (["parallel.tp=3", "parallel.dp=1"], "tp 3"),
    (["data.train=[]"], "data.train is empty"),
    (['data.train=["nowhere/train"]'], "nowhere/train"),
    (["data.seq_len=64"], "model.max_seq_len"),
    (["model.vocab_size=none"], "vocab_size"),
    (["train.dtype=fp8"], "train.dtype"),
    (["parallel.cp=2"], "cp"),
    (["parallel.pp=3"], "num_layers 2 is less than pp * num_chunks 3"),
    (["model.init_from=nowhere"], "nowhere"),
    (["--nproc", "3", "parallel.tp=2"], "3 ranks"),
    (["--nproc", "0"], "--nproc 0"),
]


@pytest.mark.parametrize(("changes", "says"), BAD)
def test_what_cannot_run_is_refused_at_once(
    changes: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, one line, and nothing is written or started."""
    config = runs.write_config(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", str(config), *changes]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert said.err.startswith("rankmesh: error: ") and says in said.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_used_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On one rank, and before two are started; the finished run stays as it is."""
    config = runs.write_config(tmp_path)
    assert main(["train", str(config), "train.steps=1"]) == 0
    capsys.readouterr()
    kept = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    lock = tmp_path / "run" / "lock"
    for changes in ([], ["parallel.dp=2"]):
        assert main(["train", str(config), *changes]) == 2
        assert "holds a run that is done" in capsys.readouterr().err
    now = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert {**now, lock: b""} == {**kept, lock: b""}


def test_a_run_that_diverges_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Field report L15, as a user meets it: a rate far too high; nothing is saved."""
    config = runs.write_config(tmp_path)
    assert main(["train", str(config), "optimizer.lr=1e38"]) == 1
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and "is not finite, first on rank 0" in said
    status = read_status(tmp_path / "run")
    assert status["state"] == "failed" and f"error: {status['error']}" in said
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == status["step"] < 6
    assert not (tmp_path / "run" / "checkpoints").exists()
    last = [f"log.run_dir={tmp_path / 'last'}", "optimizer.lr=1e38", "train.steps=1"]
    assert main(["train", str(config), *last]) == 1
    assert "is not finite; the weights are not saved" in capsys.readouterr().err
    assert not (tmp_path / "last" / "checkpoints").exists()


RAISE = 'raise RuntimeError("the cat sat on rank 1")'
FAULTS = [
    ("forward", RAISE, "the cat sat on rank 1"),
    ("backward", RAISE, "the cat sat on rank 1"),
    ("loader", RAISE, "the cat sat on rank 1"),
    ("save", 'raise OSError(28, "No space left on device")', "No space left on device"),
    ("forward", "os.kill(os.getpid(), 9)", "SIGKILL"),
    ("gradient", "pass", "step 3: the gradient of "),
]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "deed", "says"), FAULTS)
def test_one_rank_ends_all(place: str, deed: str, says: str, tmp_path: Path) -> None:
    """Field reports U01, L15: rank 1 fails in step 3, in its forward, backward, loader or save.

    All processes are gone within 10 s, the exit code is 1, rank 1's text is on stderr once, and
    status.json says why.
    """
    config = runs.write_config(tmp_path)
    hooks, stamp = tmp_path / "hooks", tmp_path / "stamp"
    hooks.mkdir()
    text = FAULT.format(stamp=str(stamp), place=place, deed=deed)
    (hooks / "sitecustomize.py").write_text(text, encoding="ascii")
    process = command(config, ["parallel.dp=2", "checkpoint.every=3"], hooks)
    _, err = process.communicate(timeout=200)
    if stamp.exists():
        assert time.time() - float(stamp.read_text()) < 10
    assert process.returncode == 1
    assert err.count(says) == 1 and "rank 1" in err and "Traceback" not in err
    assert len(err.splitlines()) == 2  # the torchrun line, and this
    assert left_of(tmp_path) == []
    status = read_status(tmp_path / "run")
    assert status["state"] == "failed" and status["step"] == (3 if place == "save" else 2)
    assert says in status["error"]
    assert not (tmp_path / "run" / "checkpoints" / "step-00000003").exists()


@pytest.mark.slow
def test_two_runs_at_once(tmp_path: Path) -> None:
    """Field report U03: nobody chose a port, nobody clashes; each has its own folder."""
    config = runs.write_config(tmp_path)
    both = [command(config, ["parallel.dp=2", f"log.run_dir={tmp_path / n}"]) for n in ("a", "b")]
    for process in both:
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
    losses = [
        [step["loss"] for step in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("a", "b")
    ]
    assert len(losses[0]) == 6 and losses[0] == losses[1]
    assert left_of(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_fails_before_the_others_come(culprit: int, tmp_path: Path) -> None:
    """Field report U01 under srun, where rank 0 keeps the store: nobody waits for who has gone.

    Rank 0's run folder has been used, or rank 1's host lacks the data; the other rank is still
    starting.
    """
    config = runs.write_config(tmp_path)
    if culprit == 0:
        assert main(["train", str(config), "train.steps=0"]) == 0
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    wait = f"import os, time\nif os.environ['SLURM_PROCID'] != '{culprit}': time.sleep(4)\n"
    (hooks / "sitecustomize.py").write_text(wait, encoding="ascii")
    slurm = {"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2", "SLURM_NODELIST": "localhost",
             "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": str(culprit)}  # fmt: skip
    lacks = ['data.train=["/nowhere/train"]']
    processes = [
        command(
            config,
            ["parallel.dp=2", *(lacks if rank == culprit == 1 else [])],
            hooks,
            **slurm,
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=100)[1] for process in processes]
    assert processes[culprit].returncode == 2 and processes[1 - culprit].returncode == 1
    says = "holds a run that is done" if culprit == 0 else "/nowhere/train"
    assert said[culprit].count(says) == 1 and "rankmesh: error" not in said[1 - culprit]
    if culprit == 1:
        assert says in read_status(tmp_path / "run")["error"]
