"""One rank's life in a training run, from the config to the result.

Owns the order: checks, run folder, start-up, model, preflight C, loop, status. Every rank runs it;
rank 0 also keeps the run folder and the console.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rankmesh.comm.bootstrap import Options, Startup, start
from rankmesh.comm.environ import Launch
from rankmesh.comm.failure import Lifeline
from rankmesh.comm.identity import digest, rank_records
from rankmesh.comm.shards import ShardDigest, check_model, fingerprint
from rankmesh.config.dump import dump
from rankmesh.config.schema import RunConfig
from rankmesh.obs.console import StepConsole
from rankmesh.obs.log import RankLog
from rankmesh.obs.metrics import MetricsWriter, StepMetrics
from rankmesh.obs.rundir import RunDir, log_folder, metrics_path
from rankmesh.specs.placement import kv_replicas, num_params
from rankmesh.topology.batch import BatchPlan
from rankmesh.topology.params import Shard
from rankmesh.train.build import Job, prepare_job
from rankmesh.train.loop import Hooks, Result, train_loop
from rankmesh.train.run import Run, assemble
from rankmesh.train.save import store_barrier


@dataclass
class Front:
    """What rank 0 shows and keeps. On other ranks `folder` and `console` are None."""

    console: StepConsole | None = None
    folder: RunDir | None = None
    metrics: MetricsWriter | None = None
    step: int = 0

    def report(self, metrics: StepMetrics) -> None:
        """A finished step: a line, a record, the status."""
        self.step = metrics.step
        if self.console is not None:
            self.console.step(metrics)
        if self.metrics is not None:
            self.metrics.write(metrics)
        if self.folder is not None:
            self.folder.set_status("running", metrics.step)

    def failed(self, line: str) -> None:
        """The run ends for this reason."""
        if self.folder is not None:
            self.folder.set_status("failed", self.step, line)


def train(config: RunConfig, launch: Launch, lifeline: Lifeline) -> Result:
    """Train as this rank of the launch; every rank calls it with the same config.

    Raises UserError for a config that cannot run, MeshError for ranks that cannot work together,
    StepError for a step that must not be applied.
    """
    job = prepare_job(config, launch.world_size)
    run_dir = Path(config.log.run_dir)
    with ExitStack() as stack:
        front = _front(config, launch, stack)
        lifeline.on_end = front.failed
        logger = _logger(launch, run_dir, front, stack) if launch.rank == 0 else None
        try:
            startup = start(
                job.plan, launch, lifeline=lifeline, options=start_options(job), logger=logger
            )
            # Only now: rank 0 has the folder, so that no line lands in another run's.
            logger = logger or _logger(launch, run_dir, front, stack)
            lifeline.logger = logger
            if front.folder is not None:
                front.folder.add_launch(job.plan.to_dict(), rank_records(job.plan, startup.ranks))
            logger.info("%s", _summary(job))
            run = assemble(config, job.spec, startup.mesh, job.source)
            preflight_c(run, startup, loaded=job.weights is not None)
            wait = store_barrier(startup.store, startup.mesh, "save")
            hooks = Hooks(report=front.report, wait=wait)
            result = train_loop(run, job, run_dir, hooks)
        except BaseException as error:
            if logger is not None:
                logger.debug("this rank ends", exc_info=error)
            front.failed(" ".join(str(error).split()) or type(error).__name__)
            raise
        _finish(front, logger, result)
    return result


def _front(config: RunConfig, launch: Launch, stack: ExitStack) -> Front:
    if launch.rank != 0:
        return Front()
    folder = stack.enter_context(RunDir(Path(config.log.run_dir), config.train.steps))
    folder.write_config(dump(config))
    folder.set_status("running", 0)
    console = StepConsole(config.train.steps, mode=config.log.console, every=config.log.every)
    metrics = stack.enter_context(MetricsWriter(metrics_path(folder.path)))
    return Front(stack.enter_context(console), folder, metrics)


def _logger(launch: Launch, run_dir: Path, front: Front, stack: ExitStack) -> logging.Logger:
    show: Callable[[str], object] | None = front.console.line if front.console is not None else None
    return stack.enter_context(RankLog(launch.rank, folder=log_folder(run_dir), show=show)).logger


def start_options(job: Job) -> Options:
    """How the ranks of a job start, and what they must agree on."""
    config = job.config
    return Options(
        device=config.train.device,
        timeout_s=config.log.timeout_s,
        agree={
            "config": digest(dump(config)),
            "data": digest([len(job.train), job.spec.to_dict()]),
        },
        kv_replicas=kv_replicas(job.spec, job.plan),
        tied_embeddings=job.spec.tie_embeddings,
    )


def preflight_c(run: Run, startup: Startup, *, loaded: bool) -> None:
    """Compare parameters over the replicas and over tp: equal where they ought to be, different
    elsewhere.

    loaded: values come from files, where equal slices prove nothing. Raises MeshError with each
    finding.
    """
    mesh = run.mesh
    # Reading or making the weights may take a rank longer than a collective may.
    store_barrier(startup.store, mesh, "weights")()
    axis_ranks = mesh.axis_ranks()
    shards = {}
    for name, entry in run.chunk.buffers.entries.items():
        split = any(isinstance(place, Shard) for place in entry.spec.placements.values())
        shards[name] = ShardDigest(
            slice_key=repr(entry.spec.slices(axis_ranks)),
            value=fingerprint(run.chunk.buffers.param(name)),
            random=split and entry.spec.init.std > 0 and not loaded,
        )
    check_model(mesh, shards, startup.store)


def _summary(job: Job) -> str:
    config, train = job.config, job.config.train
    batch = BatchPlan(train.global_batch_size, job.plan.dp, train.microbatch_size)
    return (
        f"{num_params(job.spec):,} parameters ({job.spec.family}), {len(job.train):,} samples of "
        f"{config.data.seq_len} tokens, {batch.global_batch} a step in {batch.num_microbatches} "
        f"microbatches of {batch.microbatch} on {batch.dp} replicas"
    )


def _finish(front: Front, logger: logging.Logger, result: Result) -> None:
    for name, loss in (("validation", result.valid_loss), ("test", result.test_loss)):
        if loss is not None:
            logger.info("%s loss %.4f", name, loss)
    logger.info("weights: %s", result.checkpoint)
    if front.folder is not None:
        front.folder.set_status("done", front.step)
