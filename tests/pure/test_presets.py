"""Presets: exact parameter counts and helpful refusals."""

from __future__ import annotations

import pytest

from rankmesh.errors import ConfigError
from rankmesh.specs.families import FAMILIES
from rankmesh.specs.placement import num_params
from rankmesh.specs.presets import names, preset
from rankmesh.specs.rope import Llama3Scaling

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
    "smollm-135m": 134_515_008,
    "smollm-360m": 361_821_120,
    "smollm-1.7b": 1_711_376_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    # Without the vision tower and its projection.
    "gemma3-4b": 4_300_079_472 - 416_866_032 - 2_950_272,
    "gemma3-12b": 12_187_325_040 - 416_866_032 - 4_424_832,
    "gemma3-27b": 27_432_406_640 - 416_866_032 - 6_194_304,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "phi3-mini": 3_821_079_552,
    "phi3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
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
    assert scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192
    )
    small = preset("llama-3.2-1b").rope_scaling
    assert small is not None and small.factor == 32.0
    assert preset("llama-3-8b").rope_scaling is None


def test_every_family_has_a_tiny_preset() -> None:
    assert {preset(f"{family}-tiny").family for family in FAMILIES} == set(FAMILIES)


def test_overrides_change_fields_and_what_follows_from_them() -> None:
    spec = preset("gpt2-tiny", hidden_size=96, num_layers=3, dropout=None)
    assert (spec.hidden_size, spec.head_dim, spec.ffn_size, spec.num_layers) == (96, 24, 384, 3)
    assert spec.dropout == 0.0


def test_a_wrong_name_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="'llama-3-8B'; did you mean llama-3-8b?"):
        preset("llama-3-8B")
    with pytest.raises(ConfigError, match="known: gemma2-27b, .*llama-tiny"):
        preset("zzz")
    with pytest.raises(ConfigError, match="model.hidden is not a field; did you mean hidden_size"):
        preset("gpt2", hidden=5)
