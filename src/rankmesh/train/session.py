"""One rank's life in a training run, from the config to the result.

Owns the order: checks, run folder, start-up, model, preflight C, loop, status. Every rank runs it;
rank 0 also keeps the run folder and the console.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rankmesh.checkpoint.manifest import MANIFEST
from rankmesh.checkpoint.shelf import shelf, sweep
from rankmesh.comm.bootstrap import Options, Startup, start
from rankmesh.comm.environ import Launch
from rankmesh.comm.failure import Lifeline
from rankmesh.comm.identity import digest, rank_records
from rankmesh.comm.shards import check_model
from rankmesh.config.dump import dump
from rankmesh.config.schema import RunConfig
from rankmesh.obs.console import StepConsole
from rankmesh.obs.log import RankLog
from rankmesh.obs.metrics import MetricsWriter, StepMetrics
from rankmesh.obs.rundir import RunDir, log_folder, metrics_path
from rankmesh.obs.trace import Tracer
from rankmesh.obs.trackers import Trackers, check_trackers, load_trackers
from rankmesh.specs.placement import kv_replicas, num_params
from rankmesh.topology.batch import BatchPlan
from rankmesh.train.build import Job, prepare_job
from rankmesh.train.loop import Hooks, Result, train_loop
from rankmesh.train.replicas import parameter_digests, replica_check
from rankmesh.train.resume import may_reuse, older_named
from rankmesh.train.run import Run, assemble
from rankmesh.train.save import store_barrier
from rankmesh.train.state import restore_optimizer
from rankmesh.train.tracing import agreed_attempt, make_tracer


@dataclass
class Front:
    """What rank 0 shows and keeps. On other ranks `folder` and `console` are None.

    config: name of the file that holds the config. step: the last finished one. listen: hears of
    each step, on every rank.
    """

    console: StepConsole | None = None
    folder: RunDir | None = None
    metrics: MetricsWriter | None = None
    config: str = ""
    step: int = 0
    trackers: Trackers | None = None
    listen: Callable[[StepMetrics], object] | None = None

    def report(self, metrics: StepMetrics) -> None:
        """A finished step: a line, a record, the status."""
        self.step = metrics.step
        if self.console is not None:
            self.console.step(metrics)
        if self.metrics is not None:
            self.metrics.write(metrics)
        if self.folder is not None:
            self.folder.set_status("running", metrics.step)
        if self.trackers is not None:
            self.trackers.log(metrics)
        if self.listen is not None:
            self.listen(metrics)

    def failed(self, line: str) -> None:
        """The run ends for this reason."""
        if self.folder is not None:
            self.folder.set_status("failed", self.step, line)
        if self.trackers is not None:
            self.trackers.close(failed=True)


def train(
    config: RunConfig,
    launch: Launch,
    lifeline: Lifeline,
    listen: Callable[[StepMetrics], object] | None = None,
) -> Result:
    """Train as this rank of the launch; every rank calls it with the same config. `listen` hears of
    each step.

    Raises UserError for a config that cannot run, MeshError for ranks that cannot work together,
    StepError for a step that must not be applied.
    """
    job = prepare_job(config, launch.world_size)
    run_dir = Path(config.log.run_dir)
    with ExitStack() as stack:
        front = _front(job, launch, stack)
        front.listen = listen
        lifeline.on_end = front.failed
        logger = _logger(launch, run_dir, front, stack) if launch.rank == 0 else None
        try:
            front.trackers = _trackers(front, config, logger, stack)
            startup = start(
                job.plan, launch, lifeline=lifeline, options=start_options(job), logger=logger
            )
            # Only now: rank 0 has the folder, so that no line lands in another run's.
            logger = logger or _logger(launch, run_dir, front, stack)
            lifeline.logger = logger
            attempt = agreed_attempt(front.folder, startup.store)
            _record(front, job, startup, logger)
            logger.info("%s", _summary(job))
            first = 1 if job.resume is None else job.resume.step + 1
            trace = make_tracer(config.log, startup.mesh, attempt, first, logger)
            run = _assembled(job, startup, stack.enter_context(trace))
            preflight_c(run, startup, loaded=job.weights is not None)
            wait = store_barrier(startup.store, startup.mesh, "save")
            hooks = Hooks(
                report=front.report,
                wait=wait,
                tell=logger.info,
                check=replica_check(run, startup.store),
            )
            result = train_loop(run, job, run_dir, hooks)
        except BaseException as error:
            if logger is not None:
                logger.debug("this rank ends", exc_info=error)
            front.failed(" ".join(str(error).split()) or type(error).__name__)
            raise
        _finish(front, logger, result)
    return result


def open_run_dir(config: RunConfig) -> RunDir:
    """The run's folder, locked. Raises UserError where it belongs to another run."""
    check_trackers(config.log.trackers)
    path = Path(config.log.run_dir)
    return RunDir(path, config.train.steps, again=may_reuse(config))


def _front(job: Job, launch: Launch, stack: ExitStack) -> Front:
    if launch.rank != 0:
        return Front()
    config = job.config
    step = job.resume.step if job.resume is not None else 0
    folder = stack.enter_context(open_run_dir(config))
    name = folder.write_config(dump(config))
    folder.set_status("running", step)
    console = StepConsole(config.train.steps, mode=config.log.console, every=config.log.every)
    metrics = stack.enter_context(MetricsWriter(metrics_path(folder.path), folder.attempt))
    return Front(stack.enter_context(console), folder, metrics, name, step)


def _trackers(
    front: Front, config: RunConfig, logger: logging.Logger | None, stack: ExitStack
) -> Trackers | None:
    """Rank 0's, of which `log.trackers` names none by default."""
    if front.folder is None or logger is None:
        return None
    openers = load_trackers(config.log.trackers)
    return stack.enter_context(
        Trackers(openers, front.folder.path, asdict(config), logger.warning, front.step + 1)
    )


def _record(front: Front, job: Job, startup: Startup, logger: logging.Logger) -> None:
    """Rank 0's: the launch in ranks.json, and lines about where it comes from."""
    if front.folder is None:
        return
    resume = job.resume
    for line in sweep(shelf(front.folder.path)):
        logger.warning("%s", line)
    if resume is not None:
        logger.info(
            "resumes after step %d, %d samples, from %s",
            resume.step, resume.samples, resume.weights.folder,
        )  # fmt: skip
        for note in resume.notes:
            logger.warning("resume: %s", note)
    front.folder.add_launch(
        job.plan.to_dict(),
        rank_records(job.plan, startup.ranks),
        config=front.config,
        first_step=front.step + 1,
        resumed_from=None if resume is None else str(resume.weights.folder),
    )


def _logger(launch: Launch, run_dir: Path, front: Front, stack: ExitStack) -> logging.Logger:
    show: Callable[[str], object] | None = front.console.line if front.console is not None else None
    return stack.enter_context(RankLog(launch.rank, folder=log_folder(run_dir), show=show)).logger


def start_options(job: Job) -> Options:
    """How the ranks of a job start, and what they must agree on."""
    config = job.config
    resumed = None
    if job.resume is not None:
        resumed = (job.resume.weights.folder / MANIFEST).read_text(encoding="utf-8")
    return Options(
        device=config.train.device,
        timeout_s=config.log.timeout_s,
        agree={
            "config": digest(dump(config)),
            "data": digest([len(job.train), job.spec.to_dict()]),
            "checkpoint": digest(resumed),
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
    digests = parameter_digests(run, random=not loaded)
    check_model(mesh, digests, startup.store, run.buffers.tied)


def _assembled(job: Job, startup: Startup, trace: Tracer) -> Run:
    """The run with its first values, or with those of the checkpoint that it goes on from."""
    if job.resume is None:
        return assemble(job.config, job.spec, startup.mesh, job.source, trace)
    with older_named(job.resume.weights.folder):
        run = assemble(job.config, job.spec, startup.mesh, job.source, trace)
        restore_optimizer(run, job.resume.weights)
    return run


def _summary(job: Job) -> str:
    config, train = job.config, job.config.train
    batch = BatchPlan(train.global_batch_size, job.plan.dp, train.microbatch_size)
    return (
        f"{num_params(job.spec):,} parameters ({job.spec.family}), {len(job.train):,} samples of "
        f"{config.data.seq_len} tokens, {batch.global_batch} a step: microbatches of "
        f"{batch.microbatch}, {batch.num_microbatches} on each of {batch.dp} replica(s)"
    )


def _finish(front: Front, logger: logging.Logger, result: Result) -> None:
    for name, loss in (("validation", result.valid_loss), ("test", result.test_loss)):
        if loss is not None:
            logger.info("%s loss %.4f", name, loss)
    logger.info("newest checkpoint: %s", result.checkpoint)
    if front.folder is not None:
        front.folder.set_status("done", front.step)
