"""The training loop: steps, evaluations, saves, and what a person sees of them.

Owns their order and the metrics. The step itself, the formats and the console are elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from rankmesh.checkpoint.shelf import step_folder
from rankmesh.comm.seam import Ledger
from rankmesh.data.blend import BlendOrder, Phase, training_order
from rankmesh.data.loader import Loader
from rankmesh.data.order import Order
from rankmesh.obs.cuda_memory import peak_memory_bytes
from rankmesh.obs.metrics import StepMetrics
from rankmesh.optim.scaler import LossScale
from rankmesh.theory.flops import mfu, token_flops
from rankmesh.theory.hardware import peak_flops
from rankmesh.train.build import Job
from rankmesh.train.evaluate import evaluate
from rankmesh.train.run import Run
from rankmesh.train.save import save_checkpoint
from rankmesh.train.state import training_record
from rankmesh.train.step import StepResult, train_step


@dataclass(frozen=True)
class Result:
    """What a run came to. `losses` has one entry a step of this attempt; the others are None where
    nothing was evaluated.
    """

    losses: tuple[float, ...]
    valid_loss: float | None
    test_loss: float | None
    checkpoint: Path


@dataclass(frozen=True)
class Hooks:
    """What the loop tells, on the ranks that listen. report: each step's figures. wait: a barrier
    for saves. tell: a line about a save, on rank 0. check: compares replicas after a step.
    """

    report: Callable[[StepMetrics], None]
    wait: Callable[[], None]
    tell: Callable[[str], object] = lambda line: None
    check: Callable[[int], None] = lambda step: None


def train_loop(run: Run, job: Job, run_dir: Path, hooks: Hooks) -> Result:
    """Train up to step `train.steps`, from the start or from where the job resumes; evaluate and
    save as the config says, and once after the last step.

    Sample numbers go on from those consumed, whatever the batch size was.
    """
    config = run.config
    done, samples = (job.resume.step, job.resume.samples) if job.resume is not None else (0, 0)
    loader = Loader(job.train, _order(job), run.batch, run.mesh.coordinate.dp)
    meter = _Meter(run)
    run.mesh.seam.ledger.take()
    losses: list[float] = []
    valid_loss = None
    for number in range(done + 1, config.train.steps + 1):
        started = time.perf_counter()
        result = train_step(run, number, loader.at(samples))
        samples += run.batch.global_batch
        seconds = time.perf_counter() - started
        ledger = run.mesh.seam.ledger.take()
        losses.append(result.loss)
        if _due(number, config.train.check_replicas_every):
            hooks.check(number)
        valid_loss = _evaluated(run, job, number)
        hooks.report(meter.metrics(result, seconds, ledger, valid_loss))
        if _due(number, config.checkpoint.every) and number < config.train.steps:
            _save(run, job, run_dir, number, samples, hooks)
    if config.train.steps == done and job.valid is not None:
        valid_loss = evaluate(run, job.valid)
    test_loss = evaluate(run, job.test) if job.test is not None else None
    folder = _save(run, job, run_dir, config.train.steps, samples, hooks)
    return Result(tuple(losses), valid_loss, test_loss, folder)


def _order(job: Job) -> Order:
    """Of the training samples; sets whose weights have changed go on at their own next sample."""
    seed = job.config.data.seed
    if not job.phases:
        return training_order(seed, job.train)
    return BlendOrder(seed, job.train.sizes, [Phase(*phase) for phase in job.phases])


def _due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def _evaluated(run: Run, job: Job, number: int) -> float | None:
    train = run.config.train
    if job.valid is None or not (_due(number, train.eval_every) or number == train.steps):
        return None
    loss = evaluate(run, job.valid)
    run.mesh.seam.ledger.take()
    return loss


def _save(run: Run, job: Job, run_dir: Path, number: int, samples: int, hooks: Hooks) -> Path:
    """Save the state after step `number`, unless it is the checkpoint that the run came from."""
    folder = step_folder(run_dir, number)
    if job.resume is not None and job.resume.weights.folder.resolve() == folder.resolve():
        return folder
    line = save_checkpoint(
        run,
        run_dir,
        step=number,
        training=training_record(run, samples=samples, sizes=job.train.sizes, phases=job.phases),
        wait=hooks.wait,
        tokenizer=job.tokenizer,
    )
    if line:
        hooks.tell(line)
    return folder


class _Meter:
    """Turns a step's result into figures."""

    def __init__(self, run: Run) -> None:
        self._run = run
        device = run.mesh.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak = peak_flops(name, run.config.train.dtype) if name else None
        self._flops = token_flops(run.spec, run.config.data.seq_len).total

    def metrics(
        self, result: StepResult, seconds: float, ledger: Ledger, eval_loss: float | None
    ) -> StepMetrics:
        world_size = self._run.mesh.plan.world_size
        rate = result.tokens / seconds
        return StepMetrics(
            step=result.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=result.tokens,
            tokens_per_s=rate,
            mfu=mfu(self._flops, rate, world_size, self._peak),
            step_time_s=seconds,
            peak_memory_bytes=peak_memory_bytes(self._run.mesh.device),
            comm_bytes=dict(ledger.wire_bytes),
            eval_loss=eval_loss,
            extra=_exposed(ledger.waited_s) | _scale(self._run.scale),
        )


def _scale(scale: LossScale | None) -> dict[str, float]:
    """The loss scale after the step, and the steps skipped so far; nothing where there is none."""
    if scale is None:
        return {}
    return {"loss_scale": scale.value, "skipped_steps": float(scale.skipped)}


def _exposed(waited: Mapping[str, float]) -> dict[str, float]:
    """Seconds that this rank stood waiting for collectives, by axis."""
    return {f"exposed_s.{axis}": seconds for axis, seconds in waited.items()}
