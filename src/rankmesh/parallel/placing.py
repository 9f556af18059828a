"""Where each parameter of a rank lies in its flat buffers.

Owns the order of parameters and the cut into buckets. What happens to them then is the buffers'.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from rankmesh.comm.mesh import Mesh
from rankmesh.comm.seam import Group
from rankmesh.parallel.buffers import Buffers
from rankmesh.parallel.slots import Bucket, Entry, Slot
from rankmesh.topology.params import ParamSpec

_ALIGN = 16  # elements: 64 bytes of fp32, a cache line and a vector register


@dataclass(frozen=True)
class Hold:
    """One parameter that a rank holds. uses: deposits of its gradient in a microbatch. family:
    parameters share a bucket only with others of their family. stage: where its gradient is
    complete.
    """

    spec: ParamSpec
    uses: int = 1
    family: Hashable = 0
    stage: int = 0


@dataclass(frozen=True)
class _Run:
    """Parameters that lie side by side, from `start` to `stop`, in bucket number `bucket`."""

    names: tuple[str, ...]
    start: int
    stop: int
    bucket: int


def lay_out(
    holds: Sequence[Hold],
    fused: Sequence[tuple[str, ...]],
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    tied: tuple[str, ...] = (),
) -> Buffers:
    """Allocate the buffers of the parameters `holds` (in order of use) on the mesh's device.

    Runs lie in reverse order of use, as backward completes them; a run is one parameter or a
    `fused` tuple. Buckets are as long as the ranks that share them divide evenly; main gradients
    are in max(fp32, dtype).
    """
    wide = torch.promote_types(dtype, torch.float32)
    shard = mesh.group("shard") if mesh.plan.zero else Group("self", (mesh.rank,), 0)
    by_name = {hold.spec.name: hold for hold in holds}
    shapes = {name: hold.spec.local_shape(mesh.axis_ranks()) for name, hold in by_name.items()}
    entries: dict[str, Entry] = {}
    runs: list[_Run] = []
    buckets: list[Bucket] = []
    family: Hashable = None
    unit = _ALIGN * shard.size
    for names in reversed(_together(list(by_name), fused)):
        hold = by_name[names[0]]
        size = sum(math.prod(shapes[name]) for name in names)
        start = _aligned(runs[-1].stop if runs else 0, _ALIGN)
        full = bool(buckets) and start + size - buckets[-1].start > bucket_bytes // wide.itemsize
        if full or hold.family != family:
            start, family = buckets[-1].close(unit) if buckets else 0, hold.family
            buckets.append(Bucket(start, start, hold.stage))
        stop = buckets[-1].stop = start + size
        runs.append(_Run(names, start, stop, len(buckets) - 1))
        for name in names:
            entries[name] = Entry(by_name[name].spec, start, shapes[name], buckets[-1])
            start = entries[name].stop
    end = buckets[-1].close(unit) if buckets else 0
    kept = end // shard.size if mesh.plan.zero >= 2 else end
    buffers = Buffers(
        mesh=mesh,
        params=torch.zeros(end, dtype=dtype, device=mesh.device),
        grads=torch.zeros(kept, dtype=wide, device=mesh.device),
        entries=entries,
        shard=shard,
        copies=mesh.group("shard_rep" if mesh.plan.zero else "dp_cp"),
        tied=tied,
        buckets=buckets,
    )
    if not buffers.each_microbatch:
        for bucket in buckets:
            bucket.memory = buffers.grads[bucket.start : bucket.stop]
    buffers.slots += [_slot(buffers, run, by_name[run.names[0]].uses) for run in runs]
    buffers.take_possession()
    return buffers


def _aligned(place: int, unit: int) -> int:
    return -(-place // unit) * unit


def _together(names: list[str], fused: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    home = {name: members for members in fused for name in members}
    runs: list[tuple[str, ...]] = []
    for name in names:
        members = home.get(name, (name,))
        if members[0] == name:
            runs.append(members)
    return runs


def _slot(buffers: Buffers, run: _Run, uses: int) -> Slot:
    shape = (-1, *buffers.entries[run.names[0]].shape[1:])
    bucket = buffers.buckets[run.bucket]
    slot = Slot(
        names=run.names,
        weight=buffers.params[run.start : run.stop].view(shape),
        start=run.start,
        stop=run.stop,
        like=buffers.grads[:0],
        uses=uses,
        bucket=bucket,
        full=buffers.advance,
    )
    bucket.slots.append(slot)
    return slot
