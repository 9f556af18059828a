"""A small model's tensors, and checkpoints of them by several writers. No test lives here."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankmesh.checkpoint.manifest import MANIFEST, checksum
from rankmesh.checkpoint.weights import LocalSlice, write_weights
from rankmesh.specs.model import ModelSpec, make_spec
from rankmesh.specs.placement import param_table, parts
from rankmesh.topology.plan import ParallelPlan

SPEC = make_spec(
    family="llama", num_layers=2, hidden_size=12, num_heads=4, num_kv_heads=2, head_dim=4,
    ffn_size=19, vocab_size=23, max_seq_len=16,
)  # fmt: skip


def whole(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        part.name: torch.randn(part.shape, generator=generator).to(dtype) for part in parts(spec)
    }


def held(spec: ModelSpec, tp: int, rank: int, tensors: dict[str, Tensor]) -> list[LocalSlice]:
    """What a rank writes: the slices of which it is the first holder."""
    at = {"tp": rank}
    return [
        LocalSlice(param.name, param.shape, param.slices(at), tensors[param.name][param.slices(at)])
        for param in param_table(spec, ParallelPlan(tp=tp))
        if param.is_first_holder(at)
    ]


def write_with_ranks(
    folder: Path, tp: int, tensors: dict[str, Tensor], spec: ModelSpec = SPEC, idle: int = 0
) -> None:
    """`tp` writers and `idle` ranks without slices, as threads that meet at a real barrier."""
    barrier = threading.Barrier(tp + idle)
    failures: list[Exception] = []

    def rank_body(rank: int) -> None:
        local = held(spec, tp, rank, tensors) if rank < tp else []
        try:
            write_weights(
                folder, local, spec=spec, step=7, rank=rank, barrier=lambda: _wait(barrier)
            )
        except Exception as error:  # handed to the test, which runs in another thread
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=rank_body, args=(rank,)) for rank in range(tp + idle)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in failures if not isinstance(error, threading.BrokenBarrierError)]
    if real:
        raise real[0]


def _wait(barrier: threading.Barrier) -> None:
    barrier.wait(timeout=30)


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as somebody would who knows the format: its checksum is right again."""
    content = json.loads((folder / MANIFEST).read_text())
    change(content)
    content["sha256"] = checksum(content)
    (folder / MANIFEST).write_text(json.dumps(content))
