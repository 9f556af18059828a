"""The training loop on one rank: steps, figures, evaluations, saves, and the memory it keeps."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rankmesh.checkpoint.source import open_weights
from rankmesh.data.loader import Loader, Microbatch
from rankmesh.nn import IGNORED, LossOptions
from rankmesh.obs.metrics import StepMetrics, read_metrics
from rankmesh.obs.rundir import metrics_path, read_status
from rankmesh.optim.update import AdamW
from rankmesh.train.loop import Hooks, Result, train_loop
from rankmesh.train.run import Run
from rankmesh.train.step import train_step
from tests import runs


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return runs.write_config(tmp_path)


def train(
    config: Path, overrides: Sequence[str] = (), listen: Callable[[StepMetrics], object] = id
) -> tuple[Result, list[StepMetrics], Run]:
    """One run, its figures and what is left of it. `listen` hears of each step."""
    run, job = runs.single_run(config, overrides)
    seen: list[StepMetrics] = []

    def report(metrics: StepMetrics) -> None:
        seen.append(metrics)
        listen(metrics)

    folder = Path(job.config.log.run_dir)
    result = train_loop(run, job, folder, Hooks(report=report, wait=lambda: None))
    return result, seen, run


def count_tokens(monkeypatch: pytest.MonkeyPatch, counter: list[int]) -> None:
    """Let `counter` take the tokens of every step that the loop is fed."""
    plain = Loader.at

    def at(self: Loader, consumed: int) -> list[Microbatch]:
        batches = plain(self, consumed)
        counter.append(sum(int((b.samples >= 0).sum()) * b.tokens.shape[1] for b in batches))
        return batches

    monkeypatch.setattr(Loader, "at", at)


@pytest.mark.parametrize("batch", [1, 5, 6, 7, 40])
def test_steps_and_tokens_are_those_asked_for(
    batch: int, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report L10: windows that do not divide the data set, an epoch's end inside the run.

    Exactly `train.steps` updates; the tokens in the log are the tokens fed.
    """
    fed: list[int] = []
    count_tokens(monkeypatch, fed)
    steps = 9
    updates = []
    plain = AdamW.step

    def update(self: AdamW, lr: float) -> None:
        updates.append(lr)
        plain(self, lr)

    monkeypatch.setattr(AdamW, "step", update)
    changes = [f"train.steps={steps}", f"train.global_batch_size={batch}", "data.valid=[]"]
    result, seen, _ = train(config, changes)
    assert len(result.losses) == len(seen) == steps
    assert [metrics.step for metrics in seen] == list(range(1, steps + 1))
    assert updates == [metrics.lr for metrics in seen]
    assert [metrics.tokens for metrics in seen] == fed == [batch * runs.SEQ_LEN] * steps


def test_rates_and_totals_agree(config: Path) -> None:
    """Field report L14: three microbatches a step; rate x time is the tokens of the step.

    The sum over the log lines is the total of the run.
    """
    _, seen, run = train(config)
    assert run.batch.num_microbatches == 3
    total = 6 * 6 * runs.SEQ_LEN
    assert sum(metrics.tokens for metrics in seen) == total
    elapsed = [metrics.tokens_per_s * metrics.step_time_s for metrics in seen]
    assert sum(elapsed) == pytest.approx(total, rel=1e-9)


def forced(run: Run, means: Sequence[float]) -> None:
    """The model's token losses of microbatch j become means[j], whatever it computes."""
    left = iter(means)

    def head_loss(hidden: Tensor, weight: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
        return hidden.sum() * 0.0 + next(left) * int((labels != IGNORED).sum())

    run.parallel.chunks[0].model.use(
        replace(run.parallel.chunks[0].model.parts, head_loss=head_loss)
    )


def rows_with(counts: Sequence[int]) -> list[Microbatch]:
    """Microbatches of one row with so many valid labels each."""
    made = []
    for number, count in enumerate(counts):
        labels = torch.full((1, 8), IGNORED)
        labels[0, :count] = 1
        made.append(Microbatch(torch.ones_like(labels), labels, torch.tensor([number])))
    return made


@pytest.mark.parametrize(("counts", "loss"), [([1, 1, 1, 1], 3.0), ([1, 1, 1, 5], 4.5)])
def test_the_logged_loss_is_the_mean_over_targets(
    counts: list[int], loss: float, config: Path
) -> None:
    """Field report L12: microbatch losses 1, 2, 3, 6; neither the last one nor a mean of means."""
    run, _ = runs.single_run(config, ["train.global_batch_size=4", "train.microbatch_size=1"])
    forced(run, [1.0, 2.0, 3.0, 6.0])
    result = train_step(run, 1, rows_with(counts))
    assert result.loss == loss and result.valid == sum(counts)


def test_evaluations_are_equal_and_disturb_nothing(config: Path) -> None:
    """Field report X16: with a rate too small to move a weight, three evaluations are one number.

    With a real rate, a run with evaluations has, bit for bit, the losses of a run without.
    """
    still = ["optimizer.lr=1e-30", "optimizer.weight_decay=0", "train.eval_every=2"]
    _, seen, _ = train(config, [*still, f"log.run_dir={config.parent / 'still'}"])
    found = [metrics.eval_loss for metrics in seen if metrics.eval_loss is not None]
    assert len(found) == 3 and len(set(found)) == 1
    dropout = "model.dropout=0.2"
    watched, _, _ = train(config, ["train.eval_every=1", dropout])
    alone, _, _ = train(config, ["data.valid=[]", dropout, f"log.run_dir={config.parent / 'b'}"])
    assert watched.losses == alone.losses
    assert watched.valid_loss is not None and alone.valid_loss is None


def test_when_it_evaluates_and_saves(config: Path) -> None:
    """At the steps asked for and after the last one, never twice; a resumable name each."""
    result, seen, run = train(config, ["train.eval_every=4", "checkpoint.every=2"])
    assert [m.step for m in seen if m.eval_loss is not None] == [4, 6]
    assert result.valid_loss == seen[-1].eval_loss
    folder = Path(run.config.log.run_dir) / "checkpoints"
    names = ["step-00000002", "step-00000004", "step-00000006"]
    assert sorted(path.name for path in folder.iterdir()) == names
    saved = open_weights(result.checkpoint)
    whole = tuple(slice(0, n) for n in run.table["embed.weight"].shape)
    assert torch.equal(saved.slice("embed.weight", whole), run.buffers.param("embed.weight"))


def test_a_run_of_no_steps_still_evaluates_and_saves(config: Path) -> None:
    """`train.steps=0`: what was loaded or made is measured and written."""
    result, seen, _ = train(config, ["train.steps=0"])
    assert result.losses == () and seen == []
    assert result.valid_loss is not None and result.checkpoint.name == "step-00000000"


@pytest.fixture
def frozen() -> Iterator[None]:
    """What other tests have left is not looked at: it may be much."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def tensors() -> int:
    """Tensors that Python can reach now, of those made since `frozen`."""
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def test_nothing_grows_from_step_to_step(config: Path, frozen: None) -> None:
    """Field report Y03: live tensors from step 3 to step 30, evaluations and saves in between."""
    counts: list[int] = []
    changes = ["train.steps=30", "train.eval_every=7", "checkpoint.every=10"]
    train(config, changes, lambda metrics: counts.append(tensors()))
    assert len(counts) == 30 and set(counts[2:]) == {counts[2]}


def test_a_deleted_run_frees_its_memory(config: Path, frozen: None) -> None:
    """Field report Y06: build, train, delete, three times over: as many live tensors as before."""
    before = None
    for number in range(4):
        _, _, run = train(config, ["train.steps=2", f"log.run_dir={config.parent / str(number)}"])
        buffers = weakref.ref(run.buffers)
        del run
        left = tensors()
        assert buffers() is None
        # The first round also fills torch's own caches.
        before = left if before is None else before
        assert left == before


@pytest.mark.parametrize("stdout", ["left", "full"])
def test_a_run_survives_its_console(config: Path, stdout: str) -> None:
    """Whose reader goes away (`| head -1`), or whose file finds no room: the files are whole."""
    words = [sys.executable, "-m", "rankmesh", "train", str(config), "train.steps=5"]
    full = open("/dev/full", "wb")  # noqa: SIM115
    with (
        full,
        subprocess.Popen(
            words, stdout=subprocess.PIPE if stdout == "left" else full, stderr=subprocess.PIPE
        ) as process,
    ):
        if process.stdout is not None:
            process.stdout.readline()
            process.stdout.close()
        assert process.stderr is not None and process.stderr.read() == b""
        assert process.wait(timeout=120) == 0
    run = config.parent / "run"
    assert read_status(run)["state"] == "done" and len(read_metrics(metrics_path(run))) == 5
