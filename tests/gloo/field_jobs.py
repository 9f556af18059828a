"""What the ranks of the field report tests do, in worker processes."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankmesh import models
from rankmesh.comm.failure import Lifeline
from rankmesh.comm.mesh import Mesh
from rankmesh.comm.seam import Group, Seam, TorchTransport
from rankmesh.config.load import load_config
from rankmesh.config.resolve import parallel_plan
from rankmesh.data.loader import Loader, Microbatch
from rankmesh.errors import StepError
from rankmesh.nn import IGNORED, LossOptions
from rankmesh.parallel.execute import execute
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import kv_replicas
from rankmesh.testing.worker import Worker
from rankmesh.topology.params import Init, ParamSpec, ParamTable, Replicate
from rankmesh.topology.plan import ParallelPlan
from rankmesh.train import run as run_module
from rankmesh.train import save, session
from rankmesh.train.run import Run, assemble, fresh_values
from rankmesh.train.step import stage_input, train_step
from tests import tiny
from tests.gloo.group_jobs import launch_of


def digest(tensor: Tensor) -> str:
    """Equal where all bits are."""
    content = tensor.detach().contiguous().numpy().tobytes()
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def start_run(
    worker: Worker, spec: ModelSpec, tp: int = 1, dp: int = 1, pp: int = 1, **changes: Any
) -> Run:
    """A fresh run on a mesh of all ranks of the job; changes: as `tiny.config` takes them."""
    config = tiny.config(tp=tp, dp=dp, pp=pp, **changes)
    plan = parallel_plan(config.parallel, worker.world_size)
    mesh = worker.mesh(
        plan, kv_replicas=kv_replicas(spec, plan), tied_embeddings=spec.tie_embeddings
    )
    return assemble(config, spec, mesh, fresh_values(config.train.seed))


def batches_of(run: Run, steps: int) -> Iterator[list[Microbatch]]:
    """This replica's microbatches of each step."""
    whole = tiny.batches(
        steps=steps,
        global_batch=run.batch.global_batch,
        seq_len=11,
        vocab=run.spec.vocab_size,
    )
    for batch in whole:
        yield tiny.microbatches(batch, run.batch, run.mesh.coordinate.dp)


def fresh_shards(worker: Worker, family: str, tp: int, model: dict[str, Any]) -> list[Any]:
    """[name, placed, kind, slice, digest, sum of squares, elements, std] of each parameter here."""
    spec = getattr(tiny, family)(**model)
    run = start_run(worker, spec, tp, 1, train={"dtype": "fp32"})
    found = []
    for name, entry in run.buffers.entries.items():
        held = run.buffers.param(name)
        place = entry.spec.placements.get("tp", Replicate())
        index = repr(entry.spec.slices(run.mesh.axis_ranks()))
        square = float(held.double().square().sum())
        init = entry.spec.init
        cut = not isinstance(place, Replicate)
        found.append([name, cut, init.kind, index, digest(held), square, held.numel(), init.std])
    return found


def gathered_norms(
    worker: Worker, family: str, tp: int, dp: int, clip: float
) -> list[tuple[float, float, float]]:
    """(logged norm, norm of the gathered mean gradient, its norm after clipping) of two steps."""
    run = start_run(
        worker, getattr(tiny, family)(), tp, dp, optimizer={"clip_grad": clip, "lr": 0.05}
    )
    found = []
    for number, batch in enumerate(batches_of(run, 2), start=1):
        result = train_step(run, number, batch)
        whole = [gathered(run, name) for name in run.buffers.entries]
        clipped = math.sqrt(sum(float(grad.square().sum()) for grad in whole))
        factor = min(1.0, clip / (result.grad_norm + 1e-6)) if clip else 1.0
        found.append((result.grad_norm, clipped / factor, clipped))
    return found


def gathered(run: Run, name: str) -> Tensor:
    """A whole gradient: every rank lays its slice down, each element divided by its holders."""
    entry = run.buffers.entries[name]
    both = torch.zeros(2, *entry.spec.shape, dtype=torch.float64)
    index = (slice(None), *entry.spec.slices(run.mesh.axis_ranks()))
    both[index] = torch.stack(
        (run.buffers.grad(name), torch.ones(entry.shape, dtype=torch.float64))
    )
    if dist.is_initialized():
        dist.all_reduce(both)
    return both[0] / both[1]


# --- two models in one world


@contextmanager
def no_global_group() -> Iterator[None]:
    """Whoever looks up the default process group meets an error."""

    def refuse(*args: Any) -> Any:
        raise AssertionError("the default process group was looked up")

    module: Any = dist.distributed_c10d
    plain = module._get_default_group
    module._get_default_group = refuse
    try:
        yield
    finally:
        module._get_default_group = plain


def independent_models(worker: Worker, pairs: list[list[int]], axis: str, seed: int) -> list[Any]:
    """One model on each pair of ranks, with seeds from `seed` on; [seed, losses, norms, digest of
    this rank's weights].
    """
    worker.start()
    handles = [dist.new_group(pair, timeout=timedelta(seconds=30)) for pair in pairs]
    number = next(n for n, pair in enumerate(pairs) if worker.rank in pair)
    seed += number
    return [seed, *_on_pair(worker, pairs[number], handles[number], axis, seed)]


def _on_pair(worker: Worker, pair: list[int], handle: Any, axis: str, seed: int) -> list[Any]:
    plan = ParallelPlan(**{axis: 2})
    index = pair.index(worker.rank)
    names = ("tp", "world") if axis == "tp" else ("dp", "dp_cp", "world")
    groups = {name: Group(name, tuple(pair), index, handle) for name in names}
    mesh = Mesh(plan, index, torch.device("cpu"), Seam(TorchTransport()), groups)
    config = tiny.config(**{axis: 2}, train={"seed": seed})
    run = assemble(config, tiny.llama(), mesh, fresh_values(config.train.seed))
    losses, norms = [], []
    with no_global_group():
        for number, batch in enumerate(batches_of(run, 3), start=1):
            result = train_step(run, number, batch)
            losses.append(result.loss)
            norms.append(result.grad_norm)
    return [losses, norms, digest(run.buffers.params)]


# --- parameters that not everybody uses


def add_parameters(names: tuple[str, ...]) -> None:
    """From here on every model of this worker also has these vectors [H], which nothing uses."""
    plain_build, plain_table = models.build, run_module.param_table

    def build(spec: ModelSpec, *args: Any, **options: Any) -> Any:
        model = plain_build(spec, *args, **options)
        for name in names:
            setattr(model, name, nn.Parameter(torch.empty(spec.hidden_size, device="meta")))
        return model

    def table(spec: ModelSpec, *args: Any, **options: Any) -> ParamTable:
        shape = (spec.hidden_size,)
        more = [ParamSpec(name=name, shape=shape, init=Init("ones"), decay=False) for name in names]
        return ParamTable((*plain_table(spec, *args, **options).specs, *more))

    models.build, run_module.param_table = build, table


def use_parameter(run: Run, name: str | None) -> None:
    """Let the model add this vector to the residual stream before its last norm; None: no more."""
    model = run.parallel.chunks[0].model
    plain = model.parts.parameter

    def leave(x: Tensor) -> Tensor:
        return x if name is None else x + plain(getattr(model, name))

    model.use(replace(model.parts, leave=leave))


def sometimes_used(worker: Worker, tp: int, dp: int) -> list[list[float]]:
    """Largest gradients of a vector that is never used and of one used in every second step."""
    add_parameters(("never", "second"))
    run = start_run(worker, tiny.llama(), tp, dp, bucket_mb=0.0001)
    found = []
    for number, batch in enumerate(batches_of(run, 4), start=1):
        use_parameter(run, "second" if number % 2 == 0 else None)
        train_step(run, number, batch)
        grads = [run.buffers.grad(name) for name in ("never", "second")]
        found.append([float(grad.abs().max()) for grad in grads])
    assert torch.equal(run.buffers.param("never"), torch.ones(24, dtype=torch.float64))
    return found


def branches(worker: Worker) -> dict[str, Any]:
    """Rank 0 uses one vector and rank 1 another; the worst difference from the sum of what the
    ranks computed alone, the size of both gradients, and the weights after a step.
    """
    names = ("first", "second")
    add_parameters(names)
    run = start_run(worker, tiny.llama(), 1, 2, bucket_mb=0.0001)
    use_parameter(run, names[worker.rank])
    buffers = run.buffers
    (batch,) = batches_of(run, 1)
    inputs = [stage_input(one, run.mesh, dropout=None) for one in batch]
    buffers.begin_step(0)
    execute(run.actions, run.parallel, run.hops, inputs, run.loss)
    buffers.settle()
    alone = buffers.grads.clone()
    dist.all_reduce(alone)
    buffers.begin_step(len(inputs))
    execute(run.actions, run.parallel, run.hops, inputs, run.loss)
    buffers.finish()
    worst = float((buffers.grads - alone).abs().max())
    sizes = [float(buffers.grad(name).abs().max()) for name in names]
    train_step(run, 1, batch)
    return {"worst": worst, "sizes": sizes, "weights": digest(buffers.params)}


# --- figures


def forced_loss(worker: Worker, means: list[list[float]], counts: list[list[int]]) -> float:
    """The logged loss where microbatch j of this rank costs means[rank][j] a target."""
    num = len(counts[0])
    train = {"global_batch_size": num * worker.world_size, "microbatch_size": 1}
    run = start_run(worker, tiny.llama(), 1, worker.world_size, train=train)
    left = iter(means[worker.rank])

    def head_loss(hidden: Tensor, weight: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
        return hidden.sum() * 0.0 + next(left) * int((labels != IGNORED).sum())

    run.parallel.chunks[0].model.use(
        replace(run.parallel.chunks[0].model.parts, head_loss=head_loss)
    )
    batch = []
    for number, count in enumerate(counts[worker.rank]):
        labels = torch.full((1, 8), IGNORED)
        labels[0, :count] = 1
        batch.append(Microbatch(torch.ones_like(labels), labels, torch.tensor([number])))
    return train_step(run, 1, batch).loss


# --- values that are not finite


def poisoned(
    worker: Worker, sizes: list[int], fault: str, rank: int, name: str, zero: int = 0
) -> dict[str, Any]:
    """Three steps with a fault on `rank` in the third; what the step said, and whether the weights
    stayed as they were. sizes: tp, dp, pp.
    """
    options = {"train": {"dtype": "fp32"}, "parallel": {"zero": zero}}
    run = start_run(worker, tiny.llama(), *sizes, **options)
    first, second, third = batches_of(run, 3)
    train_step(run, 1, first)
    train_step(run, 2, second)
    if worker.rank == rank or fault == "overflow":
        FAULTS[fault](run, name)
    before = run.buffers.params.clone()
    said = ""
    try:
        train_step(run, 3, third)
    except StepError as error:
        said = str(error)
    now = run.buffers.params
    untouched = torch.equal(now.nan_to_num(7.0), before.nan_to_num(7.0))
    return {"said": said, "untouched": untouched, "finite": bool(torch.isfinite(now).all())}


def _bad_weight(run: Run, name: str) -> None:
    run.buffers.param(name).view(-1)[0] = math.nan


def _bad_value(run: Run, name: str) -> None:
    """Finite weights whose product is not."""
    run.buffers.param(name).fill_(3e38)


def _bad_gradient(run: Run, name: str, value: float = math.nan, times: int = 1 << 30) -> None:
    slot = next(slot for slot in run.buffers.slots if name in slot.names)
    plain = slot._deposited
    left = iter(range(times))

    def deposited() -> None:
        if next(left, None) is not None:
            run.buffers.grad(name).view(-1)[0] = value
        plain()

    slot._deposited = deposited  # type: ignore[method-assign]


FAULTS = {
    "weight": _bad_weight,
    "value": _bad_value,
    "gradient": _bad_gradient,
    "once": lambda run, name: _bad_gradient(run, name, times=1),
    "overflow": lambda run, name: _bad_gradient(run, name, value=3e38),
}


# --- whole runs, as the command makes them


def train_job(
    worker: Worker, config: str, overrides: list[str], port: int, slow: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One rank of `rankmesh train` without a launcher: losses, and the sample numbers it was fed.

    slow: {"assemble": [rank, seconds], "save": [rank, seconds]}.
    """
    launch = replace(launch_of(worker), master_port=port)
    fed: list[int] = []
    _record_samples(fed)
    for what, (rank, seconds) in (slow or {}).items():
        if rank == worker.rank:
            _delay(what, seconds)
    lifeline = Lifeline(launch, "host")
    result = session.train(load_config(Path(config), overrides), launch, lifeline)
    lifeline.await_all()
    lifeline.part()
    return {"losses": result.losses, "valid": result.valid_loss, "samples": fed}


def _record_samples(fed: list[int]) -> None:
    plain = Loader.at

    def at(self: Loader, consumed: int) -> list[Microbatch]:
        batches = plain(self, consumed)
        if self.end is None:
            fed.extend(int(n) for batch in batches for n in batch.samples if n >= 0)
        return batches

    Loader.at = at  # type: ignore[method-assign]


def _delay(what: str, seconds: float) -> None:
    places: dict[str, tuple[Any, str]] = {
        "assemble": (session, "assemble"),
        "save": (save, "write_weights"),
    }
    module, name = places[what]
    plain = getattr(module, name)

    def slowly(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return plain(*args, **options)

    setattr(module, name, slowly)
