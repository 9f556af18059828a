"""Checks of recomputation: bits, bytes, collectives, and which layers.

Each runs in one worker process and raises AssertionError with a message of its own.
"""

from __future__ import annotations

import dataclasses

import torch

from rankmesh.config.load import load_config
from rankmesh.specs.presets import preset
from rankmesh.testing.worker import Worker
from rankmesh.theory.activations import ActivationShape, layer_bytes
from rankmesh.topology.plan import ParallelPlan
from tests import tiny
from tests.one import test_activations, test_recompute, test_theory_ledger

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
BATCH, LENGTH = 2, 12


def bits(worker: Worker) -> None:
    """Gradients with and without recomputation are equal."""
    spec = tiny.llama(num_layers=2, **DROPOUT)
    _, plain, _ = test_recompute.step_gradients(spec, {})
    for mode in test_recompute.MODES:
        _, again, _ = test_recompute.step_gradients(spec, mode)
        for name, gradient in plain.items():
            assert torch.equal(gradient, again[name]), f"recompute: gradient of {name}, {mode}"


def saved(worker: Worker) -> None:
    """What autograd saves of a layer in 16 bits."""
    for family in ("llama", "gpt2"):
        for mode in test_activations.MODES:
            spec = getattr(tiny, family)(**DROPOUT)
            plan = ParallelPlan(**mode)
            shape = ActivationShape(batch=BATCH, length=LENGTH, dtype_bytes=2)
            found = test_activations.saved_bytes(spec, plan, torch.bfloat16, BATCH, LENGTH)
            expected = layer_bytes(spec, plan, shape)
            assert found == expected, f"recompute: a {family} layer keeps {found}, not {expected}"


def held(worker: Worker) -> None:
    """What the allocator holds beside that: less than a number for each element."""
    spec = tiny.gpt2(**DROPOUT)
    shape = ActivationShape(batch=BATCH, length=LENGTH, dtype_bytes=4)
    found = test_activations.held_bytes(spec, ParallelPlan(), torch.float32, BATCH, LENGTH)
    more = found - layer_bytes(spec, ParallelPlan(), shape)
    assert more < 8 * BATCH * LENGTH * spec.hidden_size, f"recompute: the allocator holds {found}"


def sums(worker: Worker) -> None:
    """The collectives of a step, two chunks of which only one is recomputed."""
    spec = preset("gpt2-tiny", num_layers=4)
    for limits in (None, (0, 1)):
        plan = ParallelPlan(
            tp=2, num_chunks=2, schedule="interleaved", recompute="full", recompute_layers=limits
        )
        config = load_config(None, ["train.global_batch_size=2", "train.microbatch_size=2"])
        ours, theirs = test_theory_ledger.both_accounts(config, spec, plan, 0, 1)
        kinds = [sorted(map(str, account)) for account in (ours, theirs)]
        assert kinds[0] == kinds[1], f"recompute: collectives {len(ours)}, not {len(theirs)}"
        assert ours == theirs, "recompute: collectives in another order"


def layers(worker: Worker) -> None:
    """Of stages on two ranks with two chunks each."""
    plan = ParallelPlan(
        pp=2, num_chunks=2, schedule="interleaved", recompute="full", recompute_layers=(2, 1)
    )
    found = [[bool(plan.recomputed(stage, place)) for place in range(3)] for stage in range(4)]
    expected = [[True, True, False]] * 2 + [[True, False, False]] * 2
    assert found == expected, f"recompute: layers {found}"
    one = dataclasses.replace(plan, recompute_layers=(1,))
    assert [one.recomputed(3, place) for place in (0, 1)] == [{"block"}, set()], "recompute: layers"
