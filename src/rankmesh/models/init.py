"""Initial values that depend on nothing but (seed, logical name, global index).

Owns the counter-based normal numbers. Any slice is made alone, block by block, with work and memory
in proportion to the slice, so that every mesh starts from the same model bit for bit.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from rankmesh.nn.dropout import mix
from rankmesh.topology.params import Init, Slices

_BLOCK = 1 << 16
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _normal(index: Tensor, key: int) -> Tensor:
    """Standard normal in fp64, rounded to fp32, for flat global indices (int64; overwritten).

    torch.special.ndtri runs element by element, so a value does not depend on its place in a
    vector.
    """
    hashed = mix(mix(index.mul_(_GOLDEN).add_(key)) ^ key)
    # 52 bits, so that adding one half is exact and neither 0 nor 1 comes out.
    uniform = ((hashed >> 12) & ((1 << 52) - 1)).to(torch.float64).add_(0.5).mul_(2.0**-52)
    normal: Tensor = torch.special.ndtri(uniform)
    return normal.to(torch.float32)


def initial_values(
    init: Init, name: str, shape: tuple[int, ...], slices: Slices, seed: int
) -> Tensor:
    """The slice of parameter `name` (global `shape`) as an fp32 CPU tensor.

    Work and memory are proportional to the slice; indices are 64-bit.
    """
    local = tuple(s.stop - s.start for s in slices)
    if init.kind != "normal":
        return torch.full(local, 0.0 if init.kind == "zeros" else 1.0)
    out = torch.empty(math.prod(local))
    key = _key(seed, name)
    for start in range(0, out.numel(), _BLOCK):
        flat = torch.arange(start, min(start + _BLOCK, out.numel()))
        out[start : start + len(flat)] = _normal(_global_index(flat, shape, slices), key)
    return out.mul_(init.std).view(local)


def _global_index(flat: Tensor, shape: tuple[int, ...], slices: Slices) -> Tensor:
    """Flat index in the global tensor of each flat index in the slice."""
    index = torch.zeros_like(flat)
    stride = 1
    for dim in reversed(range(len(shape))):
        length = slices[dim].stop - slices[dim].start
        index += (flat % length + slices[dim].start) * stride
        flat = flat // length
        stride *= shape[dim]
    return index
