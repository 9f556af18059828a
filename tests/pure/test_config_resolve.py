"""Owns the step from sections to a ModelSpec and a ParallelPlan. Imports no torch."""

import pytest

from rankmesh.config import (
    ModelConfig,
    ParallelConfig,
    RunConfig,
    check_fits,
    load_config,
    model_spec,
    parallel_plan,
    prefixes,
    world_size_of,
)
from rankmesh.config.schema import entry_weights, split_ratios
from rankmesh.errors import ConfigError, PlanError
from rankmesh.specs.model import make_spec
from rankmesh.specs.presets import names, preset
from rankmesh.specs.rope import Llama3Scaling


def spec_of(*overrides: str) -> object:
    return model_spec(load_config(None, overrides).model)


@pytest.mark.parametrize("name", names())
def test_presets(name: str) -> None:
    assert spec_of(f"model.preset={name}") == preset(name)


def test_fields_change_a_preset() -> None:
    changed = spec_of("model.preset=llama-tiny", "model.dropout=0.1", "model.num_layers=3")
    assert changed == preset("llama-tiny", dropout=0.1, num_layers=3)
    scaled = spec_of("model.preset=llama-tiny", "model.rope_scaling.factor=4")
    assert scaled == preset(
        "llama-tiny",
        rope_scaling=Llama3Scaling(
            factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192
        ),
    )
    with pytest.raises(ConfigError, match="original_max_seq_len is missing; kind yarn needs it"):
        spec_of("model.preset=llama-tiny", "model.rope_scaling.kind=yarn")
    with pytest.raises(ConfigError, match="beta_fast is not a field of kind llama3"):
        spec_of("model.preset=llama-tiny", "model.rope_scaling.beta_fast=16")


def test_fields_alone() -> None:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 99, "max_seq_len": 8}
    config = ModelConfig(family="gpt2", **sizes)  # type: ignore[arg-type]
    assert model_spec(config) == make_spec(family="gpt2", **sizes)


def test_fields_change_the_spec_of_a_folder() -> None:
    base = preset("llama-tiny")
    config = ModelConfig(init_from="folder", dropout=0.2)
    assert model_spec(config, base) == preset("llama-tiny", dropout=0.2)
    with pytest.raises(ValueError, match="hand it in"):
        model_spec(config)


def test_no_model() -> None:
    with pytest.raises(ConfigError, match=r"^model: nothing says .* gpt2, .*, model\.init_from"):
        model_spec(ModelConfig())
    with pytest.raises(ConfigError, match="did you mean llama-tiny"):
        model_spec(ModelConfig(preset="lama-tiny"))
    with pytest.raises(ConfigError, match=r"init_from = \"x\": expected no model.preset"):
        ModelConfig(preset="gpt2", init_from="x")


def test_plan() -> None:
    config = ParallelConfig(tp=2, recompute="full", order=("dp", "tp", "cp", "pp"))
    plan = parallel_plan(config, 8)
    assert (plan.tp, plan.dp, plan.recompute) == (2, 4, "full")
    assert plan.order == ("dp", "tp", "cp", "pp")
    assert parallel_plan(ParallelConfig(tp=2, dp=4), 8).dp == 4
    with pytest.raises(PlanError, match="6 ranks do not tile"):
        parallel_plan(ParallelConfig(tp=2, dp=4), 6)
    assert world_size_of(config) == 2
    assert world_size_of(ParallelConfig(tp=2, pp=3, dp=4)) == 24


def test_samples_must_fit_the_model() -> None:
    config = load_config(None, ["data.seq_len=257"])
    with pytest.raises(ConfigError, match=r"data.seq_len = 257: expected at most .* is 256"):
        check_fits(config, preset("llama-tiny"))
    check_fits(load_config(None, ["data.seq_len=256"]), preset("llama-tiny"))


def test_prefixes() -> None:
    config: RunConfig = load_config(None, ["data.train=['a', ['b', 1.0]]"])
    assert prefixes(config.data.train) == ("a", "b")
    assert entry_weights(config.data.train) == (1.0, 1.0)
    assert entry_weights(("a", "b")) is None


@pytest.mark.parametrize(
    ("override", "ratios"),
    [
        ("data.split=969,30,1", (969, 30, 1)),
        ("data.split=[0.9, 0.1]", (0.9, 0.1, 0)),
        ("data.split='98, 2'", (98, 2, 0)),
        ("data.split=[1]", (1, 0, 0)),
    ],
)
def test_split_ratios(override: str, ratios: tuple[float, ...]) -> None:
    """Text or a list, of up to three numbers."""
    config = load_config(None, [override])
    assert config.data.split is not None
    assert split_ratios(config.data.split) == ratios


def test_a_split_stands_alone() -> None:
    """It makes valid and test; naming them too would be a contradiction."""
    with pytest.raises(ConfigError, match="data.split.*neither data.valid nor data.test"):
        load_config(None, ["data.split=9,1", "data.valid=['v']"])
