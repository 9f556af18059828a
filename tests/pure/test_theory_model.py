"""Owns parameter counts, FLOPs and peaks against the table, published figures and hand computation.

Imports no torch.
"""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.specs.families import FAMILIES
from rankmesh.specs.model import ModelSpec, make_spec
from rankmesh.specs.placement import num_params, param_table, parts
from rankmesh.specs.presets import names, preset
from rankmesh.theory import hardware
from rankmesh.theory.flops import mfu, token_flops
from rankmesh.theory.hardware import CATALOGUE, DTYPES, find, peak_flops
from rankmesh.theory.params import count_params, matmul_params
from rankmesh.topology.plan import ParallelPlan


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Small models of every family with every switch drawn."""
    family = draw(st.sampled_from(list(FAMILIES)))
    groups, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    switches = ("qkv_bias", "out_bias", "mlp_bias", "tie_embeddings")
    return make_spec(
        family=family,
        num_layers=draw(st.integers(1, 5)),
        hidden_size=draw(st.integers(1, 40)),
        num_heads=groups * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 9)),
        ffn_size=draw(st.integers(1, 50)),
        vocab_size=draw(st.integers(1, 99)),
        max_seq_len=draw(st.integers(1, 30)),
        **{name: draw(st.booleans()) for name in switches},
    )


# Parameters


@pytest.mark.parametrize("name", names())
def test_closed_form_equals_the_table_of_presets(name: str) -> None:
    spec = preset(name)
    assert count_params(spec).total == num_params(spec)
    assert count_params(spec).total == param_table(spec, ParallelPlan()).numel


@given(spec=specs())
def test_closed_form_equals_the_table(spec: ModelSpec) -> None:
    count = count_params(spec)
    assert count.total == num_params(spec)
    sizes = {part.name: part.shape[0] * (part.shape[1:] or (1,))[0] for part in parts(spec)}
    assert count.norms == sum(
        n for name, n in sizes.items() if "norm" in name and "qk_norm" not in name
    )
    assert count.attention == sum(n for name, n in sizes.items() if ".attn." in name)
    assert count.mlp == sum(n for name, n in sizes.items() if ".mlp." in name)
    assert count.head == sizes.get("head.weight", 0)


@given(spec=specs())
def test_matmul_parameters_are_the_matrices(spec: ModelSpec) -> None:
    tables = ("embed.weight", "positions.weight")
    matrices = [part for part in parts(spec) if len(part.shape) == 2 and part.name not in tables]
    expected = sum(part.shape[0] * part.shape[1] for part in matrices)
    if spec.tie_embeddings:
        expected += spec.vocab_size * spec.hidden_size
    assert matmul_params(spec) == expected


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
    ],
)
def test_published_counts(name: str, total: int) -> None:
    assert count_params(preset(name)).total == total


# FLOPs


def test_flops_by_hand() -> None:
    """Field report L13: layers 2, hidden 16, heads 8/2, ffn 24, vocabulary 10, length 5."""
    spec = make_spec(
        family="llama",
        num_layers=2,
        hidden_size=16,
        num_heads=8,
        num_kv_heads=2,
        ffn_size=24,
        vocab_size=10,
        max_seq_len=5,
    )
    # head_dim 2. A layer: q, o 16 x 16; k, v 16 x 4; gate, up, down 16 x 24; the head 16 x 10.
    layer = 2 * 256 + 2 * 64 + 3 * 384
    matmul = 2 * (2 * layer + 160)
    # Scores and values of 8 heads of 2: 2 * 2 * 16 FLOPs a position; 5 or, on average, 3 of them.
    full = token_flops(spec, 5, causal=False)
    causal = token_flops(spec, 5)
    assert (full.matmul, causal.matmul) == (matmul, matmul)
    assert full.attention == 2 * 64 * 5
    assert causal.attention == 2 * 64 * 3
    assert causal.total == 3 * (matmul + 2 * 64 * 3) == 3 * 7872
    assert causal.backward == 2 * causal.forward


def test_windows_count_by_enumeration() -> None:
    """gemma3: five local layers of every six."""
    spec = preset("gemma3-tiny", window=4)
    for length in (1, 3, 4, 5, 11):
        pairs = sum(
            min(query + 1, window or length) for window in spec.windows for query in range(length)
        )
        per_pair = 4 * spec.num_heads * spec.head_dim
        assert token_flops(spec, length).attention == per_pair * pairs // length
        whole = token_flops(spec, length, causal=False).attention
        assert whole == per_pair * spec.num_layers * length


def test_causal_count_by_enumeration() -> None:
    spec = preset("llama-tiny")
    for length in (1, 2, 7):
        pairs = sum(query + 1 for query in range(length))
        per_pair = spec.num_layers * 4 * spec.num_heads * spec.head_dim
        assert token_flops(spec, length).attention * length == per_pair * pairs


def test_kv_heads_change_the_weights_only() -> None:
    """Field report L13: each query head has its own products, whoever its keys belong to."""
    few, many = preset("llama-3-8b"), preset("llama-3-8b", num_kv_heads=32)
    assert token_flops(few, 4096).attention == token_flops(many, 4096).attention
    missing = 32 * 2 * 4096 * (32 - 8) * 128
    assert token_flops(many, 1).matmul - token_flops(few, 1).matmul == 2 * missing


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl"])
def test_equation_3_of_megatron(name: str) -> None:
    """96 B s l h^2 (1 + s/6h + V/16lh) counts forward twice; without, it is 72 (1 + s/6h +
    V/12lh).
    """
    spec, s = preset(name), 1024
    layers, h, vocab = spec.num_layers, spec.hidden_size, spec.vocab_size
    expected = 72 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert s * token_flops(spec, s, causal=False).total == pytest.approx(expected, rel=1e-12)


def test_palm_appendix_b() -> None:
    spec, length = preset("llama-3-8b"), 8192
    query = spec.num_heads * spec.head_dim
    expected = 6 * matmul_params(spec) + 12 * spec.num_layers * query * length
    assert token_flops(spec, length, causal=False).total == expected


def test_mfu() -> None:
    assert mfu(10**9, 1000.0, 2, 1e12) == 0.5
    assert mfu(10**9, 1000.0, 2, None) is None


# Peaks


@pytest.mark.parametrize(
    ("device", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "fp32", 67),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H20", "bf16", 148),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "fp8", 5000),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA L40S", "fp16", 362),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
    ],
)
def test_peaks(device: str, dtype: str, tflops: float) -> None:
    assert peak_flops(device, dtype) == tflops * 1e12


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        "",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H200 NVL",
        "NVIDIA H100",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA L4",
        "NVIDIA RTX 9999",
    ],
)
def test_unknown_devices_have_no_peak(device: str) -> None:
    """Field report L13: no percentage for what is not in the catalogue, slices of devices
    included.
    """
    assert find(device) is None
    assert peak_flops(device, "bf16") is None


def test_unknown_dtypes_have_no_peak() -> None:
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16") is None
    assert peak_flops("NVIDIA H200", "fp64") is None


def test_catalogue() -> None:
    """Every row is complete, names its source, and claims no name that another one claims."""
    rows = json.loads(Path(hardware.__file__).with_name("hardware.json").read_text())[
        "accelerators"
    ]
    assert [dataclasses.asdict(one) for one in CATALOGUE] == rows
    for one in CATALOGUE:
        re.compile(one.device_name)
        assert one.source
        assert one.tflops and set(one.tflops) <= set(DTYPES)
        assert all(value > 0 for value in one.tflops.values())
    assert len({one.name for one in CATALOGUE}) == len(CATALOGUE)
