"""Owns what holds for every key of the config: docs, defaults, choices, round trip, documentation.

Imports no torch.
"""

import dataclasses
import string
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rankmesh.config import RunConfig, dump, explain, keys, load_config
from rankmesh.config.explain import keys_table, update_docs
from rankmesh.config.fields import OneOf, Range, doc_of, rule_of
from rankmesh.config.model import ModelConfig, RopeScalingConfig
from rankmesh.config.types import alternatives, element_hints, is_optional, is_table, walk_keys
from rankmesh.errors import ConfigError
from rankmesh.specs.families import FAMILIES
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.rope import RopeScaling
from rankmesh.topology.plan import ParallelPlan

DOCS = Path(__file__).resolve().parents[2] / "docs" / "config.md"
KEYS = list(walk_keys(RunConfig))
CHOICES = [(key, hint, entry) for key, hint, entry in KEYS if isinstance(rule_of(entry), OneOf)]
# Strings that are not picked from a list: names of things outside the config.
FREE_TEXT = {
    "model.preset",
    "model.window_pattern",
    "model.init_from",
    "data.train",
    "data.valid",
    "data.test",
    "data.split",
    "data.tokenizer",
    "parallel.schedule_file",
    "train.resume",
    "log.run_dir",
}


def wrong(value: object) -> str:
    """An override of the same type that no list of choices contains."""
    if isinstance(value, int):
        return "77"
    return "['nonsense']" if isinstance(value, tuple) else "nonsense"


@pytest.mark.parametrize(("key", "hint", "entry"), CHOICES, ids=[key for key, _, _ in CHOICES])
def test_choices(key: str, hint: Any, entry: dataclasses.Field[Any]) -> None:
    """Field report M14: an unknown choice is refused at start, and each default is a choice."""
    rule = rule_of(entry)
    assert isinstance(rule, OneOf)
    default = entry.default
    if default is None:
        assert is_optional(hint)
    for value in default if isinstance(default, tuple) else (default,):
        assert value is None or value in rule.choices
    with pytest.raises(ConfigError, match=f"^override: {key} = .*: expected one of "):
        load_config(None, [f"{key}={wrong(default)}"])
    for choice in rule.choices:
        if not isinstance(default, tuple):
            load_config(None, [f"{key}={choice}"])


def test_every_string_option_has_choices() -> None:
    """Field report M14, the whole kind: no string option without a list, but for names of
    things.
    """
    texts = {key for key, hint, _ in KEYS if "str" in str(hint) and not is_table(hint)}
    assert texts - FREE_TEXT == {key for key, _, _ in CHOICES if key != "parallel.zero"}


def test_every_key_is_documented() -> None:
    for key, _, entry in KEYS:
        assert doc_of(entry), key
        assert doc_of(entry).isascii() and "|" not in doc_of(entry), key
        assert str(explain(key)).startswith(f"{key}: ")
    assert [info.key for info in keys()] == [key for key, _, _ in KEYS]


def test_no_key_sounds_secret() -> None:
    """Messages and dumps show values, so no key may hold a secret."""
    for key, _, _ in KEYS:
        words = key.replace(".", "_").split("_")
        assert not {"token", "secret", "password", "key"} & set(words)


def test_explain() -> None:
    info = explain("optimizer.lr")
    assert (info.type, info.rule, info.default) == ("a number", "above 0", "0.0003")
    assert explain("train.dtype").allowed == 'one of "fp32", "fp64", "bf16", "fp16"'
    with pytest.raises(ConfigError, match=r"did you mean optimizer\.lr\?"):
        explain("optimizer.lrr")


def test_documentation_is_up_to_date() -> None:
    """Mend with: python -c "from rankmesh.config.explain import *;
    update_docs('docs/config.md')".
    """
    assert keys_table() in DOCS.read_text(encoding="utf-8")


def test_update_docs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# a\n<!-- keys: generated -->\nold\n<!-- end of keys -->\nb\n")
    assert update_docs(page)
    assert not update_docs(page)
    assert page.read_text() == f"# a\n{keys_table()}\nb\n"


def test_model_keys_are_the_fields_of_a_spec() -> None:
    """What `specs` accepts and what the config offers are held together here."""
    hints = typing.get_type_hints(ModelSpec)
    offered = {entry.name: rule_of(entry) for entry in dataclasses.fields(ModelConfig)}
    assert set(offered) - {"preset", "init_from"} == set(hints)
    for name, hint in hints.items():
        if typing.get_origin(hint) is typing.Literal:
            rule = offered[name]
            assert isinstance(rule, OneOf)
            assert set(rule.choices) == set(typing.get_args(hint))
    family = offered["family"]
    assert isinstance(family, OneOf)
    assert set(family.choices) == set(FAMILIES)
    scaling = {entry.name for entry in dataclasses.fields(RopeScalingConfig)}
    kinds = typing.get_args(RopeScaling)
    assert scaling == {entry.name for kind in kinds for entry in dataclasses.fields(kind)}


def test_parallel_keys_are_the_fields_of_a_plan() -> None:
    offered = {key.partition(".")[2] for key, _, _ in KEYS if key.startswith("parallel.")}
    fields = {entry.name for entry in dataclasses.fields(ParallelPlan)}
    assert offered - fields == {"schedule_costs", "schedule_memory", "schedule_file", "bucket_mb"}
    # Context parallel attention brings these.
    assert fields - offered == {"cp_kind", "cp_ulysses"}


# A value of any key, drawn from its type and its rule.

TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"))
    | st.sampled_from(string.punctuation),
    min_size=1,
    max_size=12,
)


def numbers(rule: Any, kind: type) -> st.SearchStrategy[Any]:
    low = rule.low if isinstance(rule, Range) else -1e300
    high = rule.high if isinstance(rule, Range) and rule.high < 1e300 else 1e300
    if kind is int:
        return st.integers(int(max(low, -(2**63) + 1)), int(min(high, 2**63 - 1)))
    return st.floats(
        max(low, -1e300),
        high,
        exclude_min=isinstance(rule, Range) and rule.open_low,
        exclude_max=isinstance(rule, Range) and rule.open_high,
    )


def values(hint: Any, rule: Any) -> st.SearchStrategy[Any]:
    if is_optional(hint) or len(alternatives(hint)) > 1:
        return st.one_of([values(one, rule) for one in alternatives(hint)])
    if is_table(hint):
        return sections(hint)
    if typing.get_origin(hint) is tuple:
        if isinstance(rule, OneOf):
            return st.permutations(rule.choices).map(tuple)
        inner = element_hints(hint, 2) or element_hints(hint, 4)
        assert inner is not None
        return st.tuples(*(values(one, rule) for one in inner))
    if isinstance(rule, OneOf):
        return st.sampled_from(rule.choices)
    if hint is bool:
        return st.booleans()
    return TEXT if hint is str else numbers(rule, hint)


@st.composite
def sections(draw: st.DrawFn, cls: Any) -> Any:
    """A section with a few keys away from their defaults."""
    hints = typing.get_type_hints(cls)
    entries = dataclasses.fields(cls)
    chosen = draw(st.lists(st.sampled_from(entries), max_size=4, unique_by=lambda e: e.name))
    drawn = {entry.name: draw(values(hints[entry.name], rule_of(entry))) for entry in chosen}
    try:
        return cls(**drawn)
    except ConfigError:
        assume(False)


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    hints = typing.get_type_hints(RunConfig)
    drawn = {name: draw(sections(hint)) for name, hint in hints.items()}
    try:
        return RunConfig(**drawn)
    except ConfigError:
        assume(False)
        raise


@given(config=configs())
def test_round_trip(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(dump(config), encoding="utf-8")
    assert load_config(path) == config


def test_dump_has_every_key_that_is_set() -> None:
    config = load_config(None, ["model.rope_scaling.factor=4", "parallel.dp=2"])
    text = dump(config)
    assert text.startswith("format_version = 1\n")
    assert '[model.rope_scaling]\nkind = "llama3"\nfactor = 4.0\n' in text
    assert "dp = 2\n" in text
    assert "decay_steps" not in text.replace("wsd_decay_steps", "")
