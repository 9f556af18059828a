"""Dropout masks: a pure function of what an element is, never of who computes it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.nn import DropoutKey, dropout, keep_mask


def key(samples: list[int], seed: int = 1, step: int = 4) -> DropoutKey:
    return DropoutKey(seed, step, torch.tensor(samples))


def mask(
    samples: list[int], layer: int = 0, site: int = 1, rate: float = 0.3, step: int = 4
) -> torch.Tensor:
    index = torch.arange(500).expand(len(samples), 500)
    return keep_mask(key(samples, step=step), layer, site, index, rate)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=5, unique=True))
def test_a_sample_keeps_its_mask_in_any_microbatch(samples: list[int]) -> None:
    together = mask(samples)
    for row, sample in enumerate(samples):
        assert torch.equal(together[row], mask([sample])[0])


def test_any_slice_of_the_elements_keeps_its_mask() -> None:
    index = torch.arange(500).view(1, 500)
    part = keep_mask(key([3]), 0, 1, index[:, 100:333], 0.3)
    assert torch.equal(part[0], mask([3])[0, 100:333])


def test_every_part_of_the_key_counts() -> None:
    base = mask([3])
    others = [mask([4]), mask([3], layer=1), mask([3], site=2), mask([3], step=5)]
    for other in others:
        share = (base == other).double().mean().item()
        assert 0.45 < share < 0.7  # 0.58 for independent masks of rate 0.3


def test_rates() -> None:
    for rate in (0.001, 0.1, 0.5, 0.9):
        kept = (
            keep_mask(key([0]), 0, 0, torch.arange(200_000).view(1, -1), rate)
            .double()
            .mean()
            .item()
        )
        assert abs(kept - (1 - rate)) < 0.004


def test_backward_draws_the_same_mask() -> None:
    """Ones in, ones upstream: output and gradient are both the scaled mask (field reports R03,
    R04).
    """
    x = torch.ones(2 * 7, 5, requires_grad=True)
    index = torch.arange(35).view(7, 5).repeat(2, 1)
    y = dropout(x, key([8, 9]), 0, 1, (index,), 0.4)
    y.backward(torch.ones_like(y))
    assert x.grad is not None and torch.equal(x.grad, y.detach())
    values = {round(v, 4) for v in y.detach().unique().tolist()}
    assert values == {0.0, round(1 / 0.6, 4)}


def test_no_key_no_mask() -> None:
    x = torch.ones(3, 4)
    assert dropout(x, None, 0, 0, (torch.arange(12).view(3, 4),), 0.5) is x
    assert dropout(x, key([1]), 0, 0, (torch.arange(12).view(3, 4),), 0.0) is x


def test_global_random_state_is_untouched() -> None:
    """Evaluation and recomputation disturb nothing: no mask comes from torch's generators."""
    before = torch.get_rng_state()
    mask([1, 2, 3])
    assert torch.equal(before, torch.get_rng_state())
