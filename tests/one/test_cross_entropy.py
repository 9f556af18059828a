"""Vocabulary-parallel cross entropy against dense autograd, ranks played one after another in one
process.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rankmesh.comm.seam import Group, Seam, TorchTransport
from rankmesh.nn import IGNORED, LossOptions
from rankmesh.nn.loss import plain_loss
from rankmesh.parallel.vocabulary import Rows, vocabulary_cross_entropy
from rankmesh.testing.together import run_together


def split_loss(
    logits: Tensor, labels: Tensor, cuts: list[int], options: LossOptions
) -> tuple[list[Tensor], list[Tensor]]:
    """(loss, gradient of the slice) of every rank for logits cut at `cuts`."""

    def rank_main(seam: Seam, group: Group) -> tuple[Tensor, Tensor]:
        rows = Rows(cuts[group.index], cuts[group.index + 1], cuts[-1], group, seam)
        part = logits[:, rows.start : rows.stop].clone().requires_grad_()
        loss = vocabulary_cross_entropy(part, labels, rows, options)
        loss.backward()
        assert part.grad is not None
        return loss.detach(), part.grad

    results = run_together(len(cuts) - 1, rank_main)
    return [loss for loss, _ in results], [grad for _, grad in results]


@pytest.mark.parametrize(
    "options",
    [
        LossOptions(),
        LossOptions(z_loss=0.3),
        LossOptions(label_smoothing=0.2),
        LossOptions(z_loss=0.1, label_smoothing=0.1),
        LossOptions(softcap=0.7),
        LossOptions(z_loss=0.1, label_smoothing=0.1, softcap=2.0),
    ],
)
@pytest.mark.parametrize("cuts", [[0, 7], [0, 4, 7], [0, 1, 3, 6, 7]])
def test_equals_dense_autograd(cuts: list[int], options: LossOptions) -> None:
    """Field report T12: z-loss and every other user of log Z get the exact gradient; uneven cuts,
    masked labels.
    """
    generator = torch.Generator().manual_seed(len(cuts))
    logits = torch.randn(9, cuts[-1], dtype=torch.float64, generator=generator) * 3
    labels = torch.randint(0, cuts[-1], (9,), generator=generator)
    labels[::4] = IGNORED
    dense = logits.clone().requires_grad_()
    expected = plain_loss(dense, labels, options)
    expected.backward()
    assert dense.grad is not None
    losses, grads = split_loss(logits, labels, cuts, options)
    for loss in losses:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(grads, dim=1), dense.grad, rtol=1e-10, atol=1e-12)


def test_known_values() -> None:
    """Field report T10: logits 0..3 with label 3 cost 0.4401897, not log(2) more."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64)
    losses, grads = split_loss(logits, torch.tensor([3]), [0, 2, 4], LossOptions())
    assert losses[0].item() == pytest.approx(0.4401897, abs=1e-7)
    expected = [0.0320586, 0.0871443, 0.2368828, -0.3560857]
    assert torch.cat(grads, dim=1).squeeze().tolist() == pytest.approx(expected, abs=1e-6)


def test_whole_rows_are_refused() -> None:
    """Field report T10: a replicated row handed to the split loss raises instead of costing log(tp)
    more.
    """
    rows = Rows(0, 2, 4, Group("tp", (0, 1), 0), Seam(TorchTransport()))
    with pytest.raises(
        ValueError, match=r"logits have 4 columns, this rank's share of 4 is \[0, 2\)"
    ):
        vocabulary_cross_entropy(torch.zeros(1, 4), torch.tensor([3]), rows, LossOptions())


def test_one_hot_logits_cost_nothing() -> None:
    """Field report X11: the label is the next token, shifted once; logits of 50 at the label cost
    under 1e-6.
    """
    labels = torch.tensor([3, 1, 0])
    logits = 50.0 * torch.nn.functional.one_hot(labels, 5).double()
    losses, _ = split_loss(logits, labels, [0, 2, 5], LossOptions())
    assert losses[0].item() < 1e-6


def test_huge_and_bf16_logits() -> None:
    """Field report N03: statistics in fp32; logits far from zero lose nothing."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 640, generator=generator) * 4 - 1e4
    labels = torch.randint(0, 640, (4,), generator=generator)
    losses, _ = split_loss(logits, labels, [0, 300, 640], LossOptions())
    expected = plain_loss(logits.double(), labels, LossOptions())
    assert losses[0].item() == pytest.approx(expected.item(), rel=1e-4)
    half = torch.randn(4, 64000, generator=generator).bfloat16()
    losses, _ = split_loss(half, labels, [0, 30000, 64000], LossOptions())
    assert losses[0].item() == pytest.approx(
        plain_loss(half.float(), labels, LossOptions()).item(), rel=1e-5
    )


def test_no_valid_label() -> None:
    """Field report L11: a microbatch without a target costs 0 and has gradient 0."""
    logits = torch.randn(3, 6, dtype=torch.float64)
    losses, grads = split_loss(
        logits, torch.full((3,), IGNORED), [0, 3, 6], LossOptions(z_loss=0.1)
    )
    assert losses[0].item() == 0.0 and not any(bool(grad.any()) for grad in grads)
    assert math.isfinite(losses[1].item())
