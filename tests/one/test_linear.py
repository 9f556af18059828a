"""Column and row products under tensor parallelism: heads, biases, and what runs under what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rankmesh import models, nn
from rankmesh.comm.mesh import Mesh, fake_mesh
from rankmesh.comm.seam import FakeTransport, Group, Ledger, Seam
from rankmesh.parallel.apply import Chunk, Parallel, parallelize
from rankmesh.parallel.buffers import Slot
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import param_table
from rankmesh.testing.together import run_together
from rankmesh.topology.plan import ParallelPlan
from rankmesh.train.run import fresh_values
from tests import tiny


def parallel_of(spec: ModelSpec, mesh: Mesh) -> Parallel:
    """A fresh fp64 model, split over the mesh."""
    return parallelize(
        [Chunk(0, models.build(spec))],
        param_table(spec, mesh.plan),
        mesh,
        fresh_values(7),
        dtype=torch.float64,
        bucket_bytes=1 << 16,
    )


def thread_mesh(seam: Seam, group: Group) -> Mesh:
    """The mesh of one of several threads, all of them in one tp group."""
    plan = ParallelPlan(tp=group.size)
    return Mesh(plan, group.index, torch.device("cpu"), seam, {"tp": group})


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_row_bias_arrives_once(tp: int) -> None:
    """Field report T03: weight 0, bias [1, 2, 3] and any input: the output is [1, 2, 3] everywhere.

    Its gradient is the sum over the tokens, on every rank.
    """
    spec = tiny.gpt2(hidden_size=3, num_heads=4, num_kv_heads=4, head_dim=2, ffn_size=9)
    bias = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    def rank_main(seam: Seam, group: Group) -> None:
        parallel = parallel_of(spec, thread_mesh(seam, group))
        block = parallel.chunks[0].model.layers["1"]
        for path, linear in (("attn.o", block.attn.o), ("mlp.down", block.mlp.down)):
            with torch.no_grad():
                linear.weight.zero_()
                linear.bias.copy_(bias)
            x = random(5, linear.weight.shape[1]).requires_grad_()
            out = block.parts.row(x, linear)
            assert torch.equal(out, bias.expand(5, 3))
            grad = random(5, 3)
            out.backward(grad)
            held = parallel.buffers.grad(f"layers.1.{path}.bias")
            torch.testing.assert_close(held, grad.sum(0), rtol=1e-12, atol=0.0)

    run_together(tp, rank_main)


def attention_output(parallel: Parallel, x: Tensor) -> Tensor:
    """What each query head of layer 0 hands to the output projection: [N, local heads, D]."""
    block, seen = parallel.chunks[0].model.layers["0"], []

    def row(y: Tensor, linear: nn.Linear) -> Tensor:
        seen.append(y.detach().clone())
        return y.new_zeros(len(y), linear.weight.shape[0])

    parallel.chunks[0].model.use(replace(block.parts, row=row))
    layout = nn.Layout.plain(2, 6)
    assert block.rotary is not None
    block.attn(x, block.rotary.phases(layout, x.dtype), layout)
    return seen[0].unflatten(-1, (-1, block.attn.head_dim))


def zero_kv_head(parallel: Parallel, name: str, head: int, head_dim: int, mesh: Mesh) -> None:
    """Zero the rows of one global KV head, on the ranks that hold it."""
    held = parallel.buffers.entries[name].spec.slices(mesh.axis_ranks())[0]
    first = head * head_dim - held.start
    if 0 <= first < held.stop - held.start:
        parallel.buffers.param(name)[first : first + head_dim].zero_()


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_each_query_head_reads_its_own_kv_head(tp: int) -> None:
    """Field report T02: 8 query and 4 KV heads; zeroing KV head 3 changes query heads 6 and 7 only.

    At tp 8 two ranks hold each KV head.
    """
    spec = tiny.llama(num_heads=8, num_kv_heads=4)
    x = random(12, spec.hidden_size)

    def rank_main(seam: Seam, group: Group) -> list[int]:
        mesh = thread_mesh(seam, group)
        parallel = parallel_of(spec, mesh)
        keys = parallel.buffers.param("layers.0.attn.k.weight")
        assert keys.shape[0] == max(4 // tp, 1) * spec.head_dim
        before = attention_output(parallel, x)
        for leaf in ("k", "v"):
            zero_kv_head(parallel, f"layers.0.attn.{leaf}.weight", 3, spec.head_dim, mesh)
        moved = (attention_output(parallel, x) - before).abs().amax(dim=(0, 2)) > 0
        first = parallel.chunks[0].model.layers["0"].attn.options.first_head
        return [first + place for place in moved.nonzero().flatten().tolist()]

    changed = [head for heads in run_together(tp, rank_main) for head in heads]
    assert sorted(changed) == [6, 7]


class Noting(FakeTransport):
    """Notes when a sum starts and when it is waited for."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def all_reduce(self, tensor: Tensor, group: Group, op: str) -> Any:
        """The tensor as it is, and something to wait for."""
        self.notes.append("start")
        return self

    def wait(self) -> None:
        """The end of the last sum."""
        self.notes.append("wait")


def test_the_weight_gradient_runs_under_the_input_gradients_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Column product, backward: start the all-reduce, multiply, then wait."""
    notes: list[str] = []
    plan = ParallelPlan(tp=2)
    mesh = replace(fake_mesh(plan, 0), seam=Seam(Noting(notes), Ledger()))
    parallel = parallel_of(tiny.llama(), mesh)
    plain = Slot.add_product

    def add_product(self: Slot, grad_out: Tensor, x: Tensor) -> None:
        notes.append("weight gradient")
        plain(self, grad_out, x)

    monkeypatch.setattr(Slot, "add_product", add_product)
    attn = parallel.chunks[0].model.layers["0"].attn
    x = random(4, 24).requires_grad_()
    q, k, v = attn.parts.column(x, (attn.q, attn.k, attn.v))
    (q.sum() + k.sum() + v.sum()).backward()
    assert notes == ["start", "weight gradient", "wait"]
