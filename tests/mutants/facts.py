"""Checks of what parity cannot see, because mesh and oracle share it: formulas, masks, initial
values, data.

Each runs in one worker process and raises AssertionError with a message of its own.
"""

from __future__ import annotations

import importlib
import math
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from rankmesh import models, nn
from rankmesh.data.loader import Loader
from rankmesh.data.order import SampleOrder
from rankmesh.data.samples import Samples
from rankmesh.optim.schedule import LrSchedule
from rankmesh.specs.placement import param_table
from rankmesh.specs.rope import Llama3Scaling
from rankmesh.testing.worker import Worker
from rankmesh.topology.batch import BatchPlan
from rankmesh.topology.plan import ParallelPlan
from tests import tiny
from tests.mutants import dense

# With head_dim 6 and this theta one frequency is kept, one lies on the ramp, one is divided.
LLAMA_3 = {
    "rope_theta": 64.0,
    "rope_scaling": Llama3Scaling(
        factor=4.0, low_freq_factor=0.3, high_freq_factor=2.0, original_max_seq_len=16
    ),
}


def formula(
    worker: Worker, *, family: str, scaled: bool = False, explicit: bool = False, **changes: Any
) -> None:
    """Loss and gradients of the single-device model equal the written-out formulas in fp64.

    explicit: takes the attention path with dropout, at a rate so small that nothing is dropped.
    """
    if scaled:
        changes |= LLAMA_3
    if explicit:
        changes["attention_dropout"] = 1e-30
    spec = getattr(tiny, family)(**changes)
    model = models.build(spec, device="cpu", dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    ours = dict(model.named_parameters())
    for parameter in ours.values():
        # Norms and biases too are random: ones and zeros would hide a swapped pair.
        values = torch.randn(parameter.shape, dtype=torch.float64, generator=generator) * 0.3
        parameter.data.copy_(values + 1.0 if parameter.dim() == 1 else values)
    tokens = torch.randint(0, spec.vocab_size, (2, 7), generator=generator)
    labels = torch.randint(0, spec.vocab_size, (2, 7), generator=generator)
    labels[0, 3:5] = nn.IGNORED
    weights = {name: p.detach().clone().requires_grad_() for name, p in ours.items()}
    expected = dense.loss(spec, weights, tokens, labels)
    expected.backward()
    layout = nn.Layout.plain(2, 7, dropout=nn.DropoutKey(0, 1, torch.arange(2)))
    hidden, _ = model(tokens.flatten(), layout)
    loss = model.loss(hidden, labels.flatten(), nn.LossOptions())
    loss.backward()
    _close("loss", loss.detach(), expected.detach())
    for name, parameter in ours.items():
        assert parameter.grad is not None and weights[name].grad is not None, f"no grad of {name}"
        _close(f"gradient of {name}", parameter.grad, weights[name].grad)


def _close(what: str, ours: Tensor, theirs: Tensor) -> None:
    difference = float((ours - theirs).abs().max())
    scale = max(float(theirs.abs().max()), 1e-3)
    assert difference <= 1e-10 * scale, f"formula: {what} differs by {difference} of {scale}"


def dropout(worker: Worker) -> None:
    """Masks have their rate, depend on every part of their key, scale what stays, and are the same
    in backward.
    """
    rate, size = 0.25, 20_000
    samples, index = torch.tensor([4, 9]), torch.arange(size).repeat(2, 1)

    def mask(seed: int = 1, step: int = 2, layer: int = 3, site: int = 1) -> Tensor:
        return nn.keep_mask(nn.DropoutKey(seed, step, samples), layer, site, index, rate)

    base = mask()
    share = float(base.double().mean())
    assert abs(share - (1 - rate)) < 0.01, f"masks: {share} of the elements stay"
    others = {
        "seed": mask(seed=2),
        "step": mask(step=3),
        "layer": mask(layer=4),
        "site": mask(site=2),
    }
    others["sample"] = base.flip(0)
    for part, other in others.items():
        differ = float((base != other).double().mean())
        assert abs(differ - 2 * rate * (1 - rate)) < 0.02, f"masks: {part} changes {differ} of them"
    x = torch.randn(2, size, dtype=torch.float64).requires_grad_()
    up = torch.randn(2, size, dtype=torch.float64)
    y = nn.dropout(x, nn.DropoutKey(1, 2, samples), 3, 1, (index,), rate)
    y.backward(up)
    factor = base / (1 - rate)
    assert x.grad is not None
    assert torch.allclose(y, x * factor), "masks: what stays is not divided by 1 - rate"
    assert torch.allclose(x.grad, up * factor), "masks: backward draws another mask"


def attention_dropout(worker: Worker) -> None:
    """Every head, query and key has a mask element of its own, keyed by global head."""
    length, heads = 32, 4

    def kept(first_head: int) -> Tensor:
        """[heads, query, key]: the values are unit vectors, so the output shows the mask."""
        options = nn.AttentionOptions(layer=0, scale=1.0, dropout=0.5, first_head=first_head)
        zeros = torch.zeros(length, heads, length)
        unit = torch.eye(length).unsqueeze(1).expand(length, heads, length)
        layout = nn.Layout.plain(1, length, dropout=nn.DropoutKey(0, 1, torch.tensor([5])))
        out = nn.causal_attention(zeros, zeros, unit, layout, options)
        return out.view(length, heads, length).transpose(0, 1) > 0

    base, below = kept(0), torch.ones(length, length).tril(-1).bool()
    pairs = {
        "heads": (base[0][below], base[1][below]),
        "queries": (base[:, 1:, :-1][:, below[:-1, :-1]], base[:, :-1, :-1][:, below[:-1, :-1]]),
    }
    for what, (one, other) in pairs.items():
        differ = float((one != other).double().mean())
        assert abs(differ - 0.5) < 0.1, f"masks: two {what} differ in {differ} of their elements"
    assert torch.equal(kept(2)[:2], base[2:]), "masks: head 2 is not the first head of rank 1"


def dropout_sites(worker: Worker) -> None:
    """Embedding, probabilities and both residual branches of each layer have masks of their own."""
    module = importlib.import_module("rankmesh.nn.dropout")
    spec = tiny.llama(dropout=0.1, attention_dropout=0.1)
    model = models.build(spec, device="cpu")
    layout = nn.Layout.plain(1, 5, dropout=nn.DropoutKey(0, 1, torch.tensor([0])))
    with torch.no_grad(), mock.patch.object(module, "keep_mask", wraps=nn.keep_mask) as drawn:
        model(torch.zeros(5, dtype=torch.int64), layout)
    sites = [call.args[1:3] for call in drawn.call_args_list]
    assert len(sites) == 1 + 3 * spec.num_layers, f"masks: drawn at {sites}"
    assert len(set(sites)) == len(sites), f"masks: sites repeat in {sites}"


def initial(worker: Worker) -> None:
    """Spread, mean and independence of initial values, by name and seed."""
    spec = tiny.gpt2(hidden_size=64, num_heads=8, num_kv_heads=8, head_dim=8, num_layers=3)
    table = param_table(spec, ParallelPlan())

    def values(name: str, seed: int = 5) -> Tensor:
        param = table[name]
        whole = tuple(slice(0, size) for size in param.shape)
        return models.initial_values(param.init, name, param.shape, whole, seed).double()

    small = spec.init_std / math.sqrt(2 * spec.num_layers)
    spreads = {"attn.q": spec.init_std, "attn.o": small, "mlp.up": spec.init_std, "mlp.down": small}
    for part, std in spreads.items():
        made = values(f"layers.1.{part}.weight")
        assert abs(float(made.std()) / std - 1) < 0.06, f"init: {part} spreads by {made.std()}"
        assert abs(float(made.mean())) < 0.06 * std, f"init: {part} has mean {made.mean()}"
    assert bool((values("norm.weight") == 1).all()), "init: a norm's weights are not 1"
    assert not bool(values("norm.bias").any()), "init: a bias is not 0"
    base = values("layers.1.attn.q.weight")
    others = {
        "another name": values("layers.1.attn.k.weight"),
        "another layer": values("layers.2.attn.q.weight"),
        "another seed": values("layers.1.attn.q.weight", seed=6),
        "the next row": base.roll(1, 0),
    }
    for what, other in others.items():
        alike = float((base * other).mean()) / spec.init_std**2
        assert abs(alike) < 0.1, f"init: {what} is correlated by {alike}"


class Ramp:
    """A token file whose i-th token is i."""

    prefix, meta = "ramp", None

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def tokens(self, start: int, stop: int) -> Any:
        return np.arange(start, stop)


def batches(worker: Worker) -> None:
    """Replicas together read each sample number once, the same on every dp; labels are the next
    tokens; every token but the first is a label once an epoch; epochs are shuffled anew.
    """
    length, count = 10, 21
    samples = Samples([Ramp(count * length + 1)], length)  # type: ignore[list-item]
    order = SampleOrder(3, len(samples))
    assert len(samples) == count, f"data: {len(samples)} samples"
    for dp in (1, 2, 4):
        plan = BatchPlan(7, dp, 2)
        numbers, firsts = [], {}
        for step, replica in [(step, replica) for step in range(6) for replica in range(dp)]:
            for batch in Loader(samples, order, plan, replica).step(step):  # type: ignore[arg-type]
                real = batch.samples >= 0
                held = batch.samples[real].tolist()
                numbers += held
                firsts |= dict(zip(held, batch.tokens[real, 0].tolist(), strict=True))
                shifted = batch.labels[real] == batch.tokens[real] + 1
                assert bool(shifted.all()), "data: a label is not the token after its token"
                hidden = batch.labels[~real] == nn.IGNORED
                assert bool(hidden.all()), "data: a padding row has a target"
        assert sorted(numbers) == list(range(2 * count)), f"data: dp {dp} reads {sorted(numbers)}"
        starts = [firsts[number] for number in range(2 * count)]
        wanted = [order.index(number) * length for number in range(2 * count)]
        assert starts == wanted, f"data: dp {dp} reads other samples: {starts}"
        one, two = starts[:count], starts[count:]
        assert sorted(one) == sorted(two) == list(range(0, count * length, length)), (
            f"data: an epoch is {sorted(one)}"
        )
        assert one != two and one != sorted(one), "data: epochs have one order"


def rates(worker: Worker) -> None:
    """Warm-up and decay by hand."""
    schedule = LrSchedule(kind="linear", lr=1.0, min_lr=0.2, warmup_steps=4, decay_steps=8)
    made = [round(schedule.at(step), 12) for step in range(1, 11)]
    wanted = [0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert made == wanted, f"rates: {made}"
