"""Initial values: a pure function of (seed, name, index), whatever the slice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rankmesh.models.init import initial_values
from rankmesh.topology.params import Init

NORMAL = Init("normal", 0.02)


def whole(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


@given(st.data())
def test_any_slice_is_the_slice_of_the_whole(data: st.DataObject) -> None:
    """Field report R05, strong form: gathered weights of any split equal the unsplit ones, bit for
    bit.
    """
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    cuts = []
    for size in shape:
        low = data.draw(st.integers(0, size))
        cuts.append(slice(low, data.draw(st.integers(low, size))))
    full = initial_values(NORMAL, "w", shape, whole(shape), 7)
    part = initial_values(NORMAL, "w", shape, tuple(cuts), 7)
    assert torch.equal(part, full[tuple(cuts)])


def test_blocks_do_not_show() -> None:
    """A slice longer than a block, at an odd start, equals the same stretch of the whole."""
    full = initial_values(NORMAL, "w", (200_003,), (slice(0, 200_003),), 1)
    part = initial_values(NORMAL, "w", (200_003,), (slice(12_345, 190_001),), 1)
    assert torch.equal(part, full[12_345:190_001])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_scale_does_not_depend_on_the_split(tp: int) -> None:
    """Field report R07: the standard deviation of the gathered weight is the configured one within
    1%.
    """
    parts = [
        initial_values(
            NORMAL,
            "w",
            (1024, 1024),
            (slice(1024 // tp * r, 1024 // tp * (r + 1)), slice(0, 1024)),
            3,
        )
        for r in range(tp)
    ]
    gathered = torch.cat(parts)
    assert gathered.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(gathered.mean().item()) < 1e-4
    assert all(not torch.equal(parts[0], part) for part in parts[1:])


def test_numbers_are_normal() -> None:
    """Moments and the share beyond 1, 2 and 3 standard deviations of a million values."""
    values = initial_values(
        Init("normal", 1.0), "w", (1_000_000,), (slice(0, 1_000_000),), 0
    ).double()
    assert abs(values.mean()) < 0.005 and abs(values.var() - 1) < 0.01
    assert abs((values**3).mean()) < 0.02 and abs((values**4).mean() - 3) < 0.05
    for bound, share in ((1, 0.317311), (2, 0.045500), (3, 0.002700)):
        assert (values.abs() > bound).double().mean().item() == pytest.approx(share, rel=0.08)
    assert torch.isfinite(values).all()


def test_neighbours_names_and_seeds_are_unrelated() -> None:
    a, b, c = (
        initial_values(Init("normal", 1.0), name, (4096,), (slice(0, 4096),), seed)
        for name, seed in (
            ("layers.0.attn.q.weight", 0),
            ("layers.0.attn.k.weight", 0),
            ("layers.0.attn.q.weight", 1),
        )
    )
    bound = 5 / math.sqrt(4096)
    pairs = ((a, b), (a, c), (a[1:], a[:-1]))
    for x, y in pairs:
        assert abs(torch.corrcoef(torch.stack((x, y)))[0, 1].item()) < bound


def test_constants() -> None:
    assert torch.equal(initial_values(Init("ones"), "n", (5,), (slice(1, 4),), 0), torch.ones(3))
    assert torch.equal(
        initial_values(Init("zeros"), "n", (5, 2), (slice(1, 1), slice(0, 2)), 0), torch.zeros(0, 2)
    )


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_cost_is_that_of_the_slice() -> None:
    """One of 256 shards of Llama 405B's down projection: nothing larger than the shard is ever
    made.
    """
    shape = (16384, 53248)
    cut = (slice(0, 16384), slice(53248 // 256 * 17, 53248 // 256 * 18))
    with Largest() as largest:
        shard = initial_values(NORMAL, "layers.125.mlp.down.weight", shape, cut, 0)
    assert largest.numel == shard.numel() == 16384 * 208
    small = initial_values(NORMAL, "layers.125.mlp.down.weight", shape, (slice(9, 10), cut[1]), 0)
    assert torch.equal(small, shard[9:10])
