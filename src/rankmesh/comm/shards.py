"""Preflight C, after the model is built: are replicas equal, and do shards that ought to differ?

Owns fingerprints of tensors and their comparison inside one group. Which slice a rank holds is
told to it; it knows no model and no placement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from rankmesh.comm.exchange import Store
from rankmesh.comm.mesh import Mesh
from rankmesh.comm.preflight import Finding, host_of, raise_fatal, where
from rankmesh.comm.seam import Group, Seam, TorchTransport

__all__ = ["ShardDigest", "check_model", "check_shards", "fingerprint"]

_BLOCK = 1 << 22
_SHOWN = 3
# Odd constants of splitmix64, as signed 64-bit numbers: their products wrap in int64.
_STEP, _MIX = -7046029254386353131, -4658895280553007687
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ShardDigest:
    """One parameter as held by one rank.

    slice_key: names the slice, equal where two ranks hold the same one. value: `fingerprint` of
    its elements. random: initial values are random, so that other slices have other values.
    """

    slice_key: str
    value: int
    random: bool


def fingerprint(tensor: torch.Tensor) -> int:
    """64-bit hash of a tensor's bits in order; the same on every device. A loaded model may pass.

    Works in blocks of 4M elements of 8 bytes each, on the tensor's device; synchronises once a
    block.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = 0
    for start in range(0, bits.numel(), _BLOCK):
        block = bits[start : start + _BLOCK].to(torch.int64)
        place = torch.arange(start, start + block.numel(), device=block.device)
        mixed = (block + place * _STEP) * _MIX
        mixed = (mixed ^ (mixed >> 29)) * _STEP
        total += int(mixed.sum())
    return (total + bits.numel() + (1 << 63)) % (1 << 64) - (1 << 63)


def check_model(
    mesh: Mesh, shards: Mapping[str, ShardDigest], store: Store, tied: Collection[str] = ()
) -> None:
    """Compares this rank's parameters along tp and along dp * cp, which reaches all of a stage.

    `tied`: names that the first and the last pipeline stage both hold. Collectives: those of
    `check_shards`, over the groups tp, dp_cp and embedding, outside the ledger of `mesh.seam`.
    Raises MeshError with every finding of this rank.
    """
    host, seam = host_of(store), Seam(TorchTransport())
    found = []
    for name in ("tp", "dp_cp"):
        found += check_shards(mesh.group(name), shards, seam, mesh.device, host)
    both = {name: shards[name] for name in tied if name in shards}
    if both:
        found += check_shards(mesh.group("embedding"), both, seam, mesh.device, host)
    raise_fatal(found)


def check_shards(
    group: Group,
    shards: Mapping[str, ShardDigest],
    seam: Seam,
    device: torch.device,
    host: Callable[[int], str],
) -> list[Finding]:
    """Compares the same parameters (in the same order) across `group`; equal findings on its ranks.

    Collectives: two all-gathers over `group`, of 2 and of 2 * len(shards) int64. All ranks of the
    group call it, with `shards` of names that all of them hold.
    """
    if group.size == 1:
        return []
    names = list(shards)
    heads = _gather([[_number(" ".join(names)), len(names)]], group, seam, device)
    if len({tuple(head[0]) for head in heads}) > 1:
        counts = ", ".join(str(head[0][1]) for head in heads)
        text = f"{where(group.ranks, host)} hold other parameters: {counts} of them"
        return [Finding("C", text)]
    rows = [[_number(shard.slice_key), shard.value] for shard in shards.values()]
    held = _gather(rows, group, seam, device)
    found = []
    for place, name in enumerate(names):
        cells = {rank: rank_rows[place] for rank, rank_rows in zip(group.ranks, held, strict=True)}
        text = _compare(cells, shards[name].random, host)
        found += [f"{name} over {group.name}: {text}"] if text else []
    more = [f"and {len(found) - _SHOWN} more parameters"] if len(found) > _SHOWN else []
    return [Finding("C", text) for text in found[:_SHOWN] + more]


def _compare(cells: Mapping[int, list[int]], random: bool, host: Callable[[int], str]) -> str:
    """What is wrong with one parameter; cells: rank -> (slice, value). "" where nothing is."""
    by_slice: dict[int, dict[int, list[int]]] = {}
    by_value: dict[int, dict[int, list[int]]] = {}
    for rank, (key, value) in cells.items():
        by_slice.setdefault(key, {}).setdefault(value, []).append(rank)
        by_value.setdefault(value, {}).setdefault(key, []).append(rank)
    for values in by_slice.values():
        if len(values) > 1:
            sides = [f"{where(ranks, host)}: {_hex(value)}" for value, ranks in values.items()]
            return f"replicas of one slice differ: {'; '.join(sides)}"
    for value, keys in by_value.items():
        if random and len(keys) > 1:
            ranks = sorted(rank for members in keys.values() for rank in members)
            return f"different slices are identical on {where(ranks, host)}: {_hex(value)}"
    return ""


def _gather(
    rows: list[list[int]], group: Group, seam: Seam, device: torch.device
) -> list[list[list[int]]]:
    """Every rank's rows, in group order."""
    mine = torch.tensor(rows, dtype=torch.int64, device=device).view(-1)
    out = torch.empty(group.size * mine.numel(), dtype=torch.int64, device=device)
    seam.all_gather(out, mine, group, "preflight").wait()
    held: list[list[list[int]]] = out.view(group.size, len(rows), 2).tolist()
    return held


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def _hex(value: int) -> str:
    return f"{value % (1 << 64):016x}"
