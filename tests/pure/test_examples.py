"""Every example config loads, and its plan and model fit each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankmesh.config import load_config, model_spec, parallel_plan
from rankmesh.config.resolve import check_fits
from rankmesh.specs.placement import param_table
from rankmesh.specs.presets import preset
from rankmesh.topology.release import check_release

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted([*ROOT.glob("examples/*.toml"), *ROOT.glob("src/rankmesh/cli/*.toml")])


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_fits(path: Path) -> None:
    config = load_config(path)
    base = preset("llama-3.2-1b") if config.model.init_from else None
    spec = model_spec(config.model, base)
    plan = parallel_plan(config.parallel, config.parallel.tp * (config.parallel.dp or 1))
    check_release(plan)
    check_fits(config, spec)
    assert len(param_table(spec, plan)) > 0
