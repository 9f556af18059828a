"""Activation bytes of recomputation, predicted and measured, and what it costs in time.

Owns the modes and the table. One process; layers alone, without embedding and head. Every mode runs
once a round, in turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Spread, calibration, interleave
from rankmesh import models, nn
from rankmesh.comm.mesh import fake_mesh
from rankmesh.parallel.apply import Chunk, Parallel, parallelize
from rankmesh.specs.model import ModelSpec, make_spec
from rankmesh.specs.placement import param_table
from rankmesh.theory.activations import ActivationShape, layer_bytes
from rankmesh.topology.plan import ParallelPlan
from rankmesh.train.run import fresh_values

MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "core": {"recompute": "selective"},
    "norm, activation": {
        "recompute": "selective",
        "recompute_modules": ("norm", "activation"),
    },
    "core, norm, activation": {
        "recompute": "selective",
        "recompute_modules": ("core", "norm", "activation"),
    },
    "mlp": {"recompute": "selective", "recompute_modules": ("mlp",)},
    "full": {"recompute": "full"},
}


def spec_of(family: str, *, hidden: int, layers: int, length: int) -> ModelSpec:
    """A model of heads of 64; gpt2 with dropout, llama with none and half as many KV heads."""
    heads = hidden // 64
    fields: dict[str, Any] = {
        "family": family,
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "vocab_size": 256,
        "max_seq_len": length,
    }
    if family == "gpt2":
        return make_spec(**fields, dropout=0.1, attention_dropout=0.1)
    return make_spec(**fields, num_kv_heads=heads // 2)


class Side:
    """The layers of one mode, and one microbatch."""

    def __init__(self, spec: ModelSpec, plan: ParallelPlan, batch: int, length: int) -> None:
        self.parallel: Parallel = parallelize(
            [Chunk(0, models.build(spec))],
            param_table(spec, plan),
            fake_mesh(plan, 0),
            fresh_values(1),
            dtype=torch.float32,
            bucket_bytes=1 << 30,
        )
        self.blocks = list(self.parallel.chunks[0].model.blocks())
        self.layout = nn.Layout.plain(
            batch, length, dropout=nn.DropoutKey(0, 1, torch.arange(batch))
        )
        rotary = self.blocks[0].rotary
        self.phases = None if rotary is None else rotary.phases(self.layout, torch.float32)
        self.x = torch.randn(batch * length, spec.hidden_size).requires_grad_()
        self.grad = torch.randn(batch * length, spec.hidden_size)

    def forward(self) -> Tensor:
        """Through all layers."""
        x = self.x
        for block in self.blocks:
            x, _ = block(x, self.phases, self.layout)
        return x

    def step(self) -> None:
        """Forward and backward."""
        self.parallel.buffers.begin_step(1)
        self.forward().backward(self.grad)

    def held(self) -> float:
        """Bytes a layer that the allocator holds after the forward pass; a layer's input is the
        output of the one before.
        """
        with torch.profiler.profile(profile_memory=True) as profile:
            out = self.forward()
        del out
        return sum(event.self_cpu_memory_usage for event in profile.events()) / len(self.blocks)


def measure(
    spec: ModelSpec, batch: int, length: int, rounds: int
) -> tuple[list[dict[str, Any]], list[float]]:
    """One row a mode; times are relative to those without recomputation, round by round."""
    shape = ActivationShape(batch=batch, length=length, dtype_bytes=4)
    plans = {name: ParallelPlan(**mode) for name, mode in MODES.items()}
    sides = {name: Side(spec, plan, batch, length) for name, plan in plans.items()}
    steps: list[Callable[[], None]] = [side.step for side in sides.values()]
    for step in steps:
        step()
    taken, speeds = interleave(steps, rounds, lambda: None)
    rows = [
        {
            "mode": name,
            "predicted": layer_bytes(spec, plans[name], shape),
            "held": side.held(),
            "time": Spread.of(
                [mine.cpu / plain.cpu for mine, plain in zip(runs, taken[0], strict=True)]
            ),
        }
        for (name, side), runs in zip(sides.items(), taken, strict=True)
    ]
    return rows, speeds


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both families and print a table of each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recompute", description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each mode (default 5)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    for family in ("gpt2", "llama"):
        spec = spec_of(family, hidden=args.hidden, layers=args.layers, length=args.length)
        rows, speeds = measure(spec, args.batch, args.length, args.rounds)
        print(f"{family}: MiB a layer predicted, held by the allocator; time of forward + backward")
        for row in rows:
            time = row["time"]
            print(
                f"  {row['mode']:24} {row['predicted'] / 2**20:8.2f} {row['held'] / 2**20:8.2f}   "
                f"{time.median:.2f} ({time.low:.2f} to {time.high:.2f})"
            )
        print("  matmul", calibration([speeds]))


if __name__ == "__main__":
    main()
