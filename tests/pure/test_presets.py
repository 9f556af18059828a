"""Presets: exact parameter counts and helpful refusals."""

from __future__ import annotations

import pytest

from rankmesh.errors import ConfigError
from rankmesh.specs.placement import num_params
from rankmesh.specs.presets import names, preset

# As published by the models' authors or counted by Hugging Face from the released files.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert num_params(preset(name)) == PUBLISHED[name]


def test_every_preset_is_published_or_small() -> None:
    assert len(set(names())) == len(names())
    for name in set(names()) - set(PUBLISHED):
        assert num_params(preset(name)) < 130_000_000


def test_llama_31_stretches_its_frequencies() -> None:
    scaling = preset("llama-3.1-8b").rope_scaling
    assert scaling is not None
    assert (scaling.factor, scaling.original_max_seq_len) == (8.0, 8192)
    small = preset("llama-3.2-1b").rope_scaling
    assert small is not None and small.factor == 32.0
    assert preset("llama-3-8b").rope_scaling is None


def test_overrides_change_fields_and_what_follows_from_them() -> None:
    spec = preset("gpt2-tiny", hidden_size=96, num_layers=3, dropout=None)
    assert (spec.hidden_size, spec.head_dim, spec.ffn_size, spec.num_layers) == (96, 24, 384, 3)
    assert spec.dropout == 0.0


def test_a_wrong_name_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="'llama-3-8B'; did you mean llama-3-8b?"):
        preset("llama-3-8B")
    with pytest.raises(ConfigError, match="known: gpt2, .*llama-tiny"):
        preset("zzz")
    with pytest.raises(ConfigError, match="model.hidden is not a field; did you mean hidden_size"):
        preset("gpt2", hidden=5)
