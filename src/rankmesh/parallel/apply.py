"""From a built model and a mesh to a chunk that trains: the one place where parallelisms are
applied, in order.

1. buffers: the local slices of every parameter in one piece of memory; 2. tensor parallelism: parts
that issue collectives over tp; 3. data parallelism: buckets reduced over the replicas. Size 1 is
the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rankmesh import nn
from rankmesh.comm.mesh import Mesh
from rankmesh.comm.seam import Group
from rankmesh.parallel.buffers import Buffers, Slot, lay_out
from rankmesh.parallel.heads import HeadMeans
from rankmesh.parallel.linear import ColumnProducts, Deposits, Product, RowProducts
from rankmesh.parallel.vocabulary import Rows, TableLookup, VocabularyHead
from rankmesh.topology.params import ParamSpec, ParamTable, Shard, Slices

Source = Callable[[ParamSpec, Slices], Tensor]


@dataclass(frozen=True)
class Chunk:
    """The modules of one stage as held by this rank, and their memory."""

    model: nn.Transformer
    buffers: Buffers
    table: ParamTable


def parallelize(
    model: nn.Transformer,
    table: ParamTable,
    mesh: Mesh,
    source: Source,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
) -> Chunk:
    """Turn `model`, built on the meta device, into this rank's chunk.

    source: gives the values of a parameter's slice (fp32 or wider, CPU). No collective is issued
    here.
    """
    present = dict(model.named_parameters())
    specs = [spec for spec in table if spec.name in present]
    uses = {"embed.weight": 2} if model.tied and model.embed is not None else {}
    buffers = lay_out(specs, _fused(model), uses, mesh, dtype=dtype, bucket_bytes=bucket_bytes)
    _materialize(model, buffers, source)
    _number_heads(model, table, mesh)
    model.use(_parts(model, buffers, mesh))
    return Chunk(model, buffers, table)


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


def _materialize(model: nn.Transformer, buffers: Buffers, source: Source) -> None:
    """Fill the parameter buffer and let every module's parameter be a view of it."""
    axis_ranks = buffers.mesh.axis_ranks()
    for name, entry in buffers.entries.items():
        view = buffers.param(name)
        view.copy_(source(entry.spec, entry.spec.slices(axis_ranks)))
        owner, _, leaf = name.rpartition(".")
        parameter = torch.nn.Parameter(view, requires_grad=entry.spec.trainable)
        setattr(model.get_submodule(owner), leaf, parameter)


def _number_heads(model: nn.Transformer, table: ParamTable, mesh: Mesh) -> None:
    """Tell each attention which global query head its first one is: dropout is keyed by it."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Attention):
            rows = table[f"{path}.q.weight"].slices(mesh.axis_ranks())[0]
            module.options = replace(module.options, first_head=rows.start // module.head_dim)


def _parts(model: nn.Transformer, buffers: Buffers, mesh: Mesh) -> nn.Parts:
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    slots = {parameters[name]: slot for slot in buffers.slots for name in slot.names}
    tables = {
        parameters[name]: _rows(buffers.entries[name].spec, mesh)
        for name in ("embed.weight", "positions.weight", "head.weight")
        if name in parameters
    }
    columns, rows = _layer_products(model, slots, mesh)
    # The final norm stands where the head does.
    heads = _head_product(model, slots, mesh) if model.norm is not None else {}
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


def _layer_products(
    model: nn.Transformer, slots: dict[Tensor, Slot], mesh: Mesh
) -> tuple[dict[Tensor, Product], dict[Tensor, Product]]:
    """Column and row products of all layers, each found by its (first) weight."""
    tp = mesh.group("tp")
    columns: dict[Tensor, Product] = {}
    rows: dict[Tensor, Product] = {}
    for module in model.modules():
        if not isinstance(module, nn.Attention | nn.MLP):
            continue
        children = [getattr(module, name) for name in module.fused[0]]
        held = [child for child in children if child is not None]
        columns[held[0].weight] = replace(_product(held, slots, mesh), reduce_grad=tp)
        last = module.o if isinstance(module, nn.Attention) else module.down
        rows[last.weight] = replace(_product([last], slots, mesh), reduce_out=tp)
    return columns, rows


def _head_product(
    model: nn.Transformer, slots: dict[Tensor, Slot], mesh: Mesh
) -> dict[Tensor, Product]:
    weight = model.head_weight
    sizes = (weight.shape[0],)
    return {weight: Product(slots[weight], None, sizes, mesh.seam, reduce_grad=mesh.group("tp"))}


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


def _product(linears: list[nn.Linear], slots: dict[Tensor, Slot], mesh: Mesh) -> Product:
    bias = linears[0].bias
    return Product(
        weight=slots[linears[0].weight],
        bias=slots[bias] if bias is not None else None,
        sizes=tuple(linear.weight.shape[0] for linear in linears),
        seam=mesh.seam,
    )


def _rows(spec: ParamSpec, mesh: Mesh) -> Rows:
    """The rows of a table that this rank holds; a replicated table has no group to sum over."""
    held = spec.slices(mesh.axis_ranks())[0]
    split = isinstance(spec.placements.get("tp"), Shard)
    group = mesh.group("tp") if split else Group("self", (mesh.rank,), 0)
    return Rows(held.start, held.stop, spec.shape[0], group, mesh.seam)
