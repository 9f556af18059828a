"""The sides of the step benchmark: our trainer, and its peers around the plain model.

Owns how each is built, so that all start from the same weights and see the same batches. It
measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.plain import Llama, Trainer
from rankmesh.config.resolve import parallel_plan
from rankmesh.config.schema import OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from rankmesh.data.loader import Microbatch
from rankmesh.specs.model import ModelSpec, make_spec
from rankmesh.testing.worker import Worker
from rankmesh.topology.params import ParamSpec, Slices
from rankmesh.train.run import Run, assemble
from rankmesh.train.step import train_step

Step = Callable[[], float]
LR = 3e-4


@dataclass(frozen=True)
class Shape:
    """The model and the microbatch of the comparison."""

    hidden: int = 1024
    layers: int = 8
    heads: int = 16
    kv_heads: int = 16
    ffn: int = 2816
    seq: int = 512
    vocab: int = 8192
    microbatch: int = 2

    def plain(self) -> Llama:
        """The plain model, the same weights wherever it is made."""
        torch.manual_seed(0)
        return Llama(
            dim=self.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn=self.ffn,
            vocab=self.vocab,
        )

    def spec(self) -> ModelSpec:
        """The same model in our words."""
        return make_spec(
            family="llama",
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            ffn_size=self.ffn,
            vocab_size=self.vocab,
            max_seq_len=self.seq,
        )

    def batches(self, count: int, replica: int) -> list[tuple[Tensor, Tensor]]:
        """(tokens, labels), each [B, T], of `count` steps of one replica."""
        numbers = torch.Generator().manual_seed(1 + replica)
        size = (count, self.microbatch, self.seq + 1)
        rows = torch.randint(self.vocab, size, generator=numbers)
        return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def config(shape: Shape, tp: int, dp: int, bucket_mb: float | None = None) -> RunConfig:
    """A run that does what `plain.Trainer` does."""
    buckets = {} if bucket_mb is None else {"bucket_mb": bucket_mb}
    return RunConfig(
        parallel=ParallelConfig(tp=tp, dp=dp, **buckets),
        optimizer=OptimizerConfig(
            lr=LR,
            schedule="constant",
            betas=(0.9, 0.95),
            weight_decay=0.1,
            clip_grad=1.0,
            decay_embeddings=True,
        ),
        train=TrainConfig(
            global_batch_size=shape.microbatch * dp, microbatch_size=shape.microbatch
        ),
    )


_NAMES = {
    "norm1": "attn_norm",
    "norm2": "mlp_norm",
    "gate": "mlp.gate",
    "up": "mlp.up",
    "down": "mlp.down",
}


def our_name(plain: str) -> str:
    """`layers.0.q.weight` -> `layers.0.attn.q.weight`."""
    parts = plain.split(".")
    if parts[0] == "layers":
        parts[2] = _NAMES.get(parts[2], f"attn.{parts[2]}")
    return ".".join(parts)


def our_run(worker: Worker, shape: Shape, tp: int, dp: int, bucket_mb: float | None = None) -> Run:
    """Our trainer on tp x dp ranks, from the plain model's weights."""
    return built(worker, shape, config(shape, tp, dp, bucket_mb))


def built(worker: Worker, shape: Shape, wanted: RunConfig) -> Run:
    """Our trainer of `wanted` on the mesh of all ranks, from the plain model's weights."""
    weights = {our_name(name): value.detach() for name, value in shape.plain().named_parameters()}

    def source(spec: ParamSpec, slices: Slices) -> Tensor:
        return weights[spec.name][slices]

    mesh = worker.mesh(parallel_plan(wanted.parallel, worker.world_size))
    return assemble(wanted, shape.spec(), mesh, source)


def our_steps(run: Run, batches: list[tuple[Tensor, Tensor]]) -> Step:
    """One step a call, on the next batch; returns the loss."""
    numbered = iter(enumerate(batches, start=1))

    def step() -> float:
        number, (tokens, labels) = next(numbered)
        return train_step(run, number, [Microbatch(tokens, labels, torch.arange(len(tokens)))]).loss

    return step


def peer_steps(trainer: Trainer, batches: list[tuple[Tensor, Tensor]]) -> Step:
    """One step a call, on the next batch; returns the loss."""
    left = iter(batches)
    return lambda: trainer.step(*next(left))


def plain_trainer(shape: Shape) -> Trainer:
    """The trainer of one process, as it is."""
    return Trainer(shape.plain(), LR)


def ddp_trainer(shape: Shape) -> Trainer:
    """The same behind DistributedDataParallel, whose buckets keep their default size."""
    return Trainer(DistributedDataParallel(shape.plain(), gradient_as_bucket_view=True), LR)


def dtensor_trainer(shape: Shape, tp: int) -> Trainer:
    """The same model under torch's tensor parallelism.

    The form of torch's tutorial with what makes it fast: norms hand over one DTensor, so that the
    gradients of q, k and v (gate and up) are summed once; norms themselves stay plain; the loss is
    parallel. It issues as many all-reduces as we do.
    """
    mesh = init_device_mesh("cpu", (tp,))
    return DTensorTrainer(split(shape.plain(), mesh), LR)


def split(model: Llama, mesh: DeviceMesh) -> nn.Module:
    """Shard `model` in place."""
    whole, shared = Replicate(), PrepareModuleOutput
    layer = {
        "norm1": shared(output_layouts=whole, desired_output_layouts=whole, use_local_output=False),
        "q": ColwiseParallel(),
        "k": ColwiseParallel(),
        "v": ColwiseParallel(),
        "o": RowwiseParallel(),
        "norm2": shared(output_layouts=whole, desired_output_layouts=whole, use_local_output=False),
        "gate": ColwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=whole),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    plan |= {f"layers.*.{name}": style for name, style in layer.items()}
    return parallelize_module(model, mesh, plan)


class DTensorTrainer(Trainer):
    """The plain step with a parallel loss, and a norm over DTensors and plain tensors."""

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        with loss_parallel():
            logits = self.model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss.backward()
        self.clip()
        self.optimizer.step()
        return loss.item()

    def clip(self) -> None:
        """Torch's clipping refuses a list of both DTensors (matrices) and plain tensors (norms)."""
        kinds = [
            [p for p in self.model.parameters() if (p.dim() > 1) is matrix]
            for matrix in (True, False)
        ]
        norms = [
            nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds
        ]
        total = torch.stack([norms[0].full_tensor(), norms[1]]).square().sum().sqrt()
        for kind in kinds:
            nn.utils.clip_grads_with_norm_(kind, 1.0, total)
