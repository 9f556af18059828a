"""The parts that make the families: built models, attention's paths, norms, frequencies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rankmesh import models, nn
from rankmesh.specs.placement import parts
from rankmesh.specs.presets import preset
from tests import tiny

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 9, 4, 2, 6


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("changes", [{}, {"qk_norm": "head"}, {"num_layers": 1, "qkv_bias": True}])
def test_built_models_have_the_parameters_of_the_table(family: str, changes: Any) -> None:
    spec = getattr(tiny, family)(**changes)
    built = {name: tuple(p.shape) for name, p in models.build(spec).named_parameters()}
    assert built == {part.name: part.shape for part in parts(spec)}


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(BATCH * LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return made[0].requires_grad_(), made[1].requires_grad_(), made[2].requires_grad_()


def plainly(inputs: tuple[Tensor, ...], window: int, cap: float) -> Tensor:
    """Attention written with loops over samples, heads and positions."""
    q, k, v = (x.unflatten(0, (BATCH, LENGTH)) for x in inputs)
    out = torch.zeros(BATCH, LENGTH, HEADS, DIM, dtype=torch.float64)
    for sample in range(BATCH):
        for head in range(HEADS):
            served = head // (HEADS // KV_HEADS)
            for t in range(LENGTH):
                first = max(0, t + 1 - window) if window else 0
                scores = k[sample, first : t + 1, served] @ q[sample, t, head] * 0.3
                if cap:
                    scores = cap * torch.tanh(scores / cap)
                out[sample, t, head] = scores.softmax(0) @ v[sample, first : t + 1, served]
    return out.flatten(2).flatten(0, 1)


@pytest.mark.parametrize("window", [0, 1, 4, LENGTH - 1, LENGTH, 100])
@pytest.mark.parametrize("cap", [0.0, 0.5])
@pytest.mark.parametrize("explicit", [False, True])
def test_windows_and_caps_in_both_paths(window: int, cap: float, explicit: bool) -> None:
    """Values and gradients against loops."""
    # A rate so small that nothing is dropped takes the explicit path.
    rate = 1e-30 if explicit else 0.0
    options = nn.AttentionOptions(layer=0, scale=0.3, window=window, softcap=cap, dropout=rate)
    layout = nn.Layout.plain(
        BATCH, LENGTH, dropout=nn.DropoutKey(0, 1, torch.arange(BATCH)) if explicit else None
    )
    inputs = qkv()
    out = nn.causal_attention(*inputs, layout, options)
    expected = plainly(inputs, window, cap)
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)
    up = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ours = torch.autograd.grad(out, inputs, up)
    theirs = torch.autograd.grad(expected, inputs, up)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("length", [64, 65, 150, 300])
@pytest.mark.parametrize("window", [1, 5, 63, 64, 100, 270])
def test_blocks_under_a_window_do_not_show(length: int, window: int) -> None:
    """Values and gradients equal those of the path that makes all scores at once."""
    generator = torch.Generator().manual_seed(length)
    made = [torch.randn(2 * length, heads, 4, generator=generator).double() for heads in (4, 2, 2)]
    up = torch.randn(2 * length, 16, generator=generator).double()
    results = []
    for rate in (0.0, 1e-30):
        inputs = [x.clone().requires_grad_() for x in made]
        options = nn.AttentionOptions(layer=0, scale=0.5, window=window, dropout=rate)
        layout = nn.Layout.plain(2, length, dropout=nn.DropoutKey(0, 1, torch.arange(2)))
        out = nn.causal_attention(inputs[0], inputs[1], inputs[2], layout, options)
        results.append([out, *torch.autograd.grad(out, inputs, up)])
    for blocks, whole in zip(*results, strict=True):
        assert torch.allclose(blocks, whole, rtol=1e-11, atol=1e-11)


def test_a_token_beyond_the_window_changes_nothing() -> None:
    """Mistral's: in one layer a token sees `window` positions, its own included."""
    spec = tiny.mistral(num_layers=1, window=4)
    model = models.build(spec, device="cpu", dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    tokens = torch.arange(10)
    with torch.no_grad():
        base, _ = model(tokens, nn.Layout.plain(1, 10))
        tokens[3] = 50
        changed, _ = model(tokens, nn.Layout.plain(1, 10))
    differ = [bool(row) for row in (base != changed).any(dim=1)]
    assert differ == [False] * 3 + [True] * 4 + [False] * 3


def test_logits_are_capped_and_the_loss_sees_the_cap() -> None:
    spec = tiny.gemma2()
    model = models.build(spec, device="cpu", dtype=torch.float64)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tokens, labels = torch.arange(12), torch.arange(12) + 3
    hidden, _ = model(tokens, nn.Layout.plain(1, 12))
    logits = model.logits(hidden)
    assert float(logits.detach().abs().max()) < spec.logit_softcap
    loss = model.loss(hidden, labels, nn.LossOptions())
    assert torch.allclose(loss, F.cross_entropy(logits, labels, reduction="sum"), rtol=1e-12)


def test_weights_stored_less_one_keep_their_digits_in_16_bits() -> None:
    """1 + w in bf16 would lose a w of 2^-10 altogether."""
    norm = nn.RMSNorm1p(64, 1e-6)
    norm.weight.data.fill_(2.0**-10)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)) * 200
    out = norm.to(torch.bfloat16)(x.bfloat16())
    exact = F.rms_norm(x.bfloat16().double(), (64,), eps=1e-6) * (1 + 2.0**-10)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact.bfloat16())


def test_norms_over_all_heads_in_16_bits_are_rounded_once() -> None:
    norms = nn.ProjectionNorms(HEADS * DIM, KV_HEADS * DIM, 1e-6)
    for parameter in norms.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    q, k, _ = (x.detach().bfloat16() for x in qkv())
    with torch.no_grad():
        new_q, new_k = norms(q, k)
    for new, old, weight in ((new_q, q, norms.q.weight), (new_k, k, norms.k.weight)):
        exact = F.rms_norm(old.double().flatten(1), weight.shape, weight.detach().double(), 1e-6)
        assert new.dtype == torch.bfloat16 and new.shape == old.shape
        assert float((new.flatten(1).double() - exact).abs().max()) < 2.0**-8 * float(
            exact.abs().max()
        )


def test_frequencies_of_llama_3_and_yarn() -> None:
    """Ends as published: slow waves stretched by the factor, fast ones kept."""
    plain = nn.frequencies(64, 10000.0)
    assert plain[0] == 1.0 and plain.dtype == torch.float64
    turns = 1024 * plain / (2 * torch.pi)
    llama = nn.llama3_scaled(plain, factor=8.0, low=1.0, high=4.0, context=1024)
    yarn = nn.yarn_scaled(plain, theta=10000.0, factor=8.0, slow=1.0, fast=32.0, context=1024)
    for scaled, high in ((llama, 4.0), (yarn, 64.0)):
        ratio = plain / scaled
        assert torch.allclose(ratio[turns > high], torch.ones(()).double(), rtol=1e-12)
        assert torch.allclose(ratio[turns < 0.5], torch.full((), 8.0).double(), rtol=1e-12)
        assert bool((ratio[1:] >= ratio[:-1] - 1e-12).all())
        assert bool(((ratio > 1.001) & (ratio < 7.999)).any())


@pytest.mark.parametrize("name", ["qwen3-tiny", "gemma3-tiny"])
def test_phases_stay_wide_in_16_bits(name: str) -> None:
    """Field reports N02, N05: casting the model casts no frequency; YaRN's too."""
    yarn = {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 64}
    model = models.build(preset(name, rope_scaling=yarn), device="cpu").to(torch.bfloat16)
    layout = nn.Layout.plain(1, 256)
    rotaries = {block.rotary for block in model.blocks()}
    assert len(rotaries) == (2 if name == "gemma3-tiny" else 1)
    for rotary in rotaries:
        assert rotary is not None
        narrow, wide = rotary.phases(layout, torch.bfloat16), rotary.phases(layout, torch.float64)
        for ours, exact in zip(narrow, wide, strict=True):
            assert ours.dtype == torch.float32
            assert float((ours - exact).abs().max()) < 1e-6
