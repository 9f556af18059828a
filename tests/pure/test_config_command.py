"""`rankmesh config`: keys explained, and a JSON Schema that says what the loader does."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rankmesh.cli.main import main
from rankmesh.config.explain import keys
from rankmesh.config.json_schema import json_schema
from rankmesh.config.load import load_config
from rankmesh.config.names import KEYS
from rankmesh.errors import ConfigError
from rankmesh.obs.secrets import is_secret

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["config", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether `value` is valid, for the keywords that our schema uses."""
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "const" in schema:
        return bool(value == schema["const"])
    kind = schema["type"]
    if not isinstance(value, TYPES[kind]) or isinstance(value, bool) != (kind == "boolean"):
        return False
    checks = [
        value in schema.get("enum", [value]),
        kind != "string" or len(value) >= schema.get("minLength", 0),
        kind != "object" or _fits_object(value, schema),
        kind != "array" or _fits_array(value, schema),
    ]
    if kind in ("integer", "number"):
        checks += [
            value >= schema.get("minimum", value),
            value <= schema.get("maximum", value),
            "exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"],
            "exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"],
        ]
    return all(checks)


def _fits_object(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    known = schema["properties"]
    assert schema["additionalProperties"] is False
    return all(key in known and fits(item, known[key]) for key, item in value.items())


def _fits_array(value: list[Any], schema: dict[str, Any]) -> bool:
    places = schema.get("prefixItems")
    if places is None:
        return all(fits(item, schema["items"]) for item in value)
    return len(value) == len(places) and all(map(fits, value, places))


def schema_keys(schema: dict[str, Any], above: str = "") -> set[str]:
    """Dotted keys of a schema, those of tables inside unions too; sections are none."""
    found = set()
    for name, entry in schema["properties"].items():
        tables = [one for one in entry.get("anyOf", [entry]) if one.get("type") == "object"]
        if above or not tables:
            found.add(f"{above}{name}")
        for table in tables:
            found |= schema_keys(table, f"{above}{name}.")
    return found


def test_a_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", "optimizer.lr")
    assert code == 0
    assert out.splitlines() == [
        "optimizer.lr",
        "  highest learning rate",
        "  value    a number above 0",
        "  default  0.0003",
    ]


def test_every_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """With a meaning, what it takes and its default."""
    code, out, _ = run(capsys, "explain", *KEYS, "--json")
    assert code == 0
    found = json.loads(out)
    assert [entry["key"] for entry in found] == list(KEYS)
    assert all(entry["doc"] and entry["allowed"] for entry in found)
    assert {entry["key"]: entry["default"] for entry in found}["train.steps"] == "1000"


def test_a_section_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", "checkpoint")
    assert code == 0
    assert "checkpoint.every\n" in out and "log.every" not in out


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("optimizer.lrr", "did you mean optimizer.lr?"),
        ("lr", "did you mean optimizer.lr?"),
        ("optimzer", "did you mean optimizer?"),
        ("train.every", "did you mean checkpoint.every or log.every?"),
    ],
)
def test_a_wrong_key_names_the_nearest(
    name: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = run(capsys, "explain", name)
    assert code == 2 and not out
    assert error.count("\n") == 1 and hint in error


def test_the_command_needs_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys)
    assert code == 2 and "explain|schema" in error and error.count("\n") == 1


def test_the_schema_has_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    """And a description of each, so that an editor can show it."""
    code, out, _ = run(capsys, "schema")
    assert code == 0
    schema = json.loads(out)
    assert schema == json_schema()
    assert schema["$schema"].startswith("https://json-schema.org/draft/2020-12")
    assert schema_keys(schema) - {"format_version"} == set(KEYS)
    docs = {info.key: info.doc for info in keys()}
    lr = schema["properties"]["optimizer"]["properties"]["lr"]
    assert lr["description"] == docs["optimizer.lr"] and lr["default"] == 3e-4


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_valid(path: Path) -> None:
    assert fits(tomllib.loads(path.read_text(encoding="utf-8")), json_schema())


@pytest.mark.parametrize(
    "text",
    [
        "train.steps = -1",
        "train.steps = 1.5",
        "train.steps = true",
        'train.dtype = "fp7"',
        "train.stepps = 3",
        "optimizer.lr = 0",
        "optimizer.betas = [0.9]",
        "optimizer.betas = [0.9, 1.0]",
        "data.train = [3]",
        'data.train = [["a", "b"]]',
        'log.trackers = ["wandbb"]',
        "optimizer.name = 3",
        "format_version = 99",
        "traim.steps = 3",
        'data.tokenizer = ""',
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(text: str, tmp_path: Path) -> None:
    """Rules between keys are the loader's alone."""
    assert not fits(tomllib.loads(text), json_schema())
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="ascii")
    with pytest.raises(ConfigError):
        load_config(path)


@pytest.mark.parametrize(
    "text",
    [
        "train.steps = 0",
        "optimizer.lr = 1",
        "optimizer.betas = [0.9, 0.5]",
        'data.train = ["a", ["b", 1.0]]',
        'log.trackers = ["wandb", "tensorboard"]',
        "model.rope_scaling.factor = 4.0",
        "format_version = 1",
    ],
)
def test_the_schema_takes_what_the_loader_takes(text: str, tmp_path: Path) -> None:
    assert fits(tomllib.loads(text), json_schema())
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="ascii")
    load_config(path)


def test_no_key_holds_a_secret() -> None:
    """A run's folder has the whole config, as it must to be read again: no key may be one that
    would have to be masked there. Keys of services come from those services' own variables.
    """
    assert not [key for key in KEYS if is_secret(key)]
