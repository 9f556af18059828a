"""From built models and a mesh to chunks that train: the one place where parallelisms are
applied, in order.

1. buffers: the local slices of every parameter in one piece of memory; 2. tensor parallelism: parts
that issue collectives over tp; 3. recomputation around them; 4. data parallelism: buckets reduced
over the replicas. Size 1 is the same code. Pipeline stages are cut before, when the models are
built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rankmesh import nn
from rankmesh.comm.mesh import Mesh
from rankmesh.comm.seam import Group, Seam
from rankmesh.parallel.buffers import Buffers
from rankmesh.parallel.heads import HeadMeans
from rankmesh.parallel.later import Later
from rankmesh.parallel.linear import ColumnProducts, Deposits, Product, RowProducts
from rankmesh.parallel.placing import Hold, lay_out
from rankmesh.parallel.recompute import recompute
from rankmesh.parallel.slots import Slot
from rankmesh.parallel.vocabulary import Rows, TableLookup, VocabularyHead
from rankmesh.topology.params import ParamSpec, ParamTable, Shard, Slices
from rankmesh.topology.plan import ParallelPlan

Source = Callable[[ParamSpec, Slices], Tensor]
Names = tuple[str, ...]


@dataclass(frozen=True)
class Chunk:
    """The modules of one stage as held by this rank."""

    stage: int
    model: nn.Transformer


@dataclass(frozen=True)
class Parallel:
    """All that a rank holds of the model: its chunks, their memory, and the products that a split
    backward puts off.
    """

    chunks: tuple[Chunk, ...]
    buffers: Buffers
    later: Later

    def is_first_holder(self, spec: ParamSpec) -> bool:
        """True on exactly one of the ranks of a replica that hold this rank's slice: the first
        along tp, and of a tied table the one with its first stage.
        """
        here = any(chunk.stage == spec.stages[0] for chunk in self.chunks)
        return here and spec.is_first_holder(self.buffers.mesh.axis_ranks())


def parallelize(
    chunks: Sequence[Chunk],
    table: ParamTable,
    mesh: Mesh,
    source: Source,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
) -> Parallel:
    """Turn the models of `chunks`, built on the meta device, into this rank's part of the model.

    chunks: the one whose gradients are complete last comes first. source: gives the values of a
    parameter's slice (fp32 or wider, CPU). No collective is issued here.
    """
    stages = {chunk.stage for chunk in chunks}
    fused = [names for chunk in chunks for names in _fused(chunk.model)]
    holds = _holds(chunks, table, fused)
    tied = tuple(hold.spec.name for hold in holds if not stages.issuperset(hold.spec.stages))
    buffers = lay_out(holds, fused, mesh, dtype=dtype, bucket_bytes=bucket_bytes, tied=tied)
    _materialize(chunks, buffers, source)
    later = Later()
    for chunk in chunks:
        _number_heads(chunk.model, table, mesh)
        chunk.model.use(_parts(chunk.model, buffers, mesh, later))
        for position, block in enumerate(chunk.model.blocks()):
            names = mesh.plan.recomputed(chunk.stage, position)
            if names:
                recompute(block, names)
    return Parallel(tuple(chunks), buffers, later)


def _holds(chunks: Sequence[Chunk], table: ParamTable, fused: Sequence[Names]) -> list[Hold]:
    """The parameters of this rank in order of use. A tied table has two users, and a bucket of its
    own where the other one is on another rank.

    Parameters of whose gradients tp ranks have parts lie apart and last: their buckets look the
    same on all of these ranks, whatever the sizes of the others.
    """
    stages = {chunk.stage for chunk in chunks}
    partial = _partial(table, fused)
    holds: dict[str, Hold] = {}
    for chunk in chunks:
        present = dict(chunk.model.named_parameters())
        for spec in (spec for spec in table if spec.name in present):
            uses = int(spec.trainable) * _uses(chunk.model, spec.name)
            if spec.name in holds:
                held = holds[spec.name]
                # The chunk that comes first is complete last.
                holds[spec.name] = replace(held, uses=held.uses + uses)
            else:
                shared = not stages.issuperset(spec.stages)
                family = "tied" if shared else (chunk.stage, partial[spec.name])
                holds[spec.name] = Hold(spec, uses, family, chunk.stage)
    order = {chunk.stage: number for number, chunk in enumerate(chunks)}

    def place(hold: Hold) -> tuple[int, bool]:
        stage = min(order[one] for one in hold.spec.stages if one in order)
        return stage, not partial[hold.spec.name]

    return sorted(holds.values(), key=place)


def _partial(table: ParamTable, fused: Sequence[Names]) -> dict[str, Names]:
    """Parameter -> groups over which gradients of the run that holds it are only parts."""
    sums = {spec.name: spec.grad_sum for spec in table}
    runs = {name: names for names in fused for name in names}
    return {
        name: tuple(sorted({axis for one in runs.get(name, (name,)) for axis in sums[one]}))
        for name in sums
    }


def _uses(model: nn.Transformer, name: str) -> int:
    """How often a microbatch deposits a gradient of the parameter."""
    if name != "embed.weight":
        return 1
    return int(model.enters) + int(model.tied)


def _fused(model: nn.Transformer) -> list[tuple[str, ...]]:
    """Names of parameters that one product serves: weights of fused children, their biases."""
    runs = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.Piece):
            continue
        for children in module.fused:
            held = [child for child in children if getattr(module, child) is not None]
            if len(held) < 2:
                continue
            runs.append(tuple(f"{path}.{child}.weight" for child in held))
            if getattr(module, held[0]).bias is not None:
                runs.append(tuple(f"{path}.{child}.bias" for child in held))
    return runs


def _materialize(chunks: Sequence[Chunk], buffers: Buffers, source: Source) -> None:
    """Fill the parameter buffer and let every module's parameter be a view of it."""
    names = [set(dict(chunk.model.named_parameters())) for chunk in chunks]
    axis_ranks = buffers.mesh.axis_ranks()
    for name, entry in buffers.entries.items():
        buffers.fill(name, source(entry.spec, entry.spec.slices(axis_ranks)))
        view = buffers.param(name)
        owner, _, leaf = name.rpartition(".")
        parameter = torch.nn.Parameter(view, requires_grad=entry.spec.trainable)
        for chunk, present in zip(chunks, names, strict=True):
            if name in present:
                setattr(chunk.model.get_submodule(owner), leaf, parameter)


def _number_heads(model: nn.Transformer, table: ParamTable, mesh: Mesh) -> None:
    """Tell each attention which global query head its first one is: dropout is keyed by it."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Attention):
            rows = table[f"{path}.q.weight"].slices(mesh.axis_ranks())[0]
            module.options = replace(module.options, first_head=rows.start // module.head_dim)


def _parts(model: nn.Transformer, buffers: Buffers, mesh: Mesh, later: Later) -> nn.Parts:
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    slots = {
        parameters[name]: slot
        for slot in buffers.slots
        for name in slot.names
        if name in parameters
    }
    tables = {
        parameters[name]: _rows(buffers.entries[name].spec, mesh)
        for name in ("embed.weight", "positions.weight", "head.weight")
        if name in parameters
    }
    products = _Products(slots, mesh.group("tp"), mesh.seam, later, *_sequence(mesh.plan))
    columns, rows = _layer_products(model, products)
    # The final norm stands where the head does.
    heads = {} if model.norm is None else {model.head_weight: products.head(model.head_weight)}
    head, lookup = VocabularyHead(heads, tables), TableLookup(slots, tables)
    return nn.Parts(
        column=ColumnProducts(columns),
        row=RowProducts(rows),
        lookup=lookup,
        position_lookup=lookup,
        parameter=Deposits(slots),
        head_means=HeadMeans(_shares(model, buffers), mesh.group("tp"), mesh.seam),
        head_loss=head.loss,
        logits=head.logits,
    )


@dataclass(frozen=True)
class _Products:
    """Makes the products of one chunk."""

    slots: dict[Tensor, Slot]
    tp: Group
    seam: Seam
    later: Later
    sequence: bool
    regather: bool

    def column(self, linears: list[nn.Linear]) -> Product:
        return replace(self._of(linears), reduce_grad=self.tp)

    def row(self, linear: nn.Linear) -> Product:
        return replace(self._of([linear]), reduce_out=self.tp)

    def head(self, weight: Tensor) -> Product:
        made = self._made(self.slots[weight], None, (weight.shape[0],))
        return replace(made, reduce_grad=self.tp)

    def _of(self, linears: list[nn.Linear]) -> Product:
        bias = linears[0].bias
        return self._made(
            self.slots[linears[0].weight],
            self.slots[bias] if bias is not None else None,
            tuple(linear.weight.shape[0] for linear in linears),
        )

    def _made(self, weight: Slot, bias: Slot | None, sizes: tuple[int, ...]) -> Product:
        return Product(
            weight=weight,
            bias=bias,
            sizes=sizes,
            seam=self.seam,
            later=self.later,
            sequence=self.sequence,
            regather=self.regather,
        )


def _layer_products(
    model: nn.Transformer, products: _Products
) -> tuple[dict[Tensor, Product], dict[Tensor, Product]]:
    """Column and row products of all layers, each found by its (first) weight."""
    columns: dict[Tensor, Product] = {}
    rows: dict[Tensor, Product] = {}
    for module in model.modules():
        if not isinstance(module, nn.Attention | nn.MLP):
            continue
        children = [getattr(module, name) for name in module.fused[0]]
        held = [child for child in children if child is not None]
        columns[held[0].weight] = products.column(held)
        last = module.o if isinstance(module, nn.Attention) else module.down
        rows[last.weight] = products.row(last)
    return columns, rows


def _shares(model: nn.Transformer, buffers: Buffers) -> dict[Tensor, float]:
    """What one element counts for in a mean over all heads, by the weight that numbers it."""
    shares: dict[Tensor, float] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ProjectionNorms):
            for name, holder in (("q", module.q), ("k", module.k)):
                spec = buffers.entries[f"{path}.{name}.weight"].spec
                place = spec.placements["tp"]
                holders = place.replicas if isinstance(place, Shard) else 1
                shares[holder.weight] = 1.0 / (spec.numel * holders)
    return shares


def _sequence(plan: ParallelPlan) -> tuple[bool, bool]:
    """Whether the residual stream is held in slices, and whether columns gather them again."""
    return plan.sequence_parallel and plan.tp > 1, plan.sequence_regather


def _rows(spec: ParamSpec, mesh: Mesh) -> Rows:
    """The rows of a table that this rank holds; a replicated table has no group to sum over."""
    held = spec.slices(mesh.axis_ranks())[0]
    split = isinstance(spec.placements.get("tp"), Shard)
    group = mesh.group("tp") if split else Group("self", (mesh.rank,), 0)
    sequence = split and _sequence(mesh.plan)[0]
    return Rows(held.start, held.stop, spec.shape[0], group, mesh.seam, sequence)
