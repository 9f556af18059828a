"""The body of `rankmesh init`: which model, which values, and the file.

Owns what a fresh config sets beside the defaults. The text is config_text's business.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rankmesh.cli.config_text import config_text
from rankmesh.cli.init import default_run_dir
from rankmesh.cli.init_folder import weights_facts
from rankmesh.cli.init_size import parse_size, shape_for
from rankmesh.config.load import load_config
from rankmesh.config.resolve import check_fits, model_spec
from rankmesh.config.schema import RunConfig, prefixes
from rankmesh.config.toml import toml_value
from rankmesh.data.tokenizer import BYTES
from rankmesh.errors import ConfigError, UserError, reason
from rankmesh.specs.checks import nearest
from rankmesh.specs.families import FAMILIES
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.presets import names
from rankmesh.theory.params import count_params

_DEFAULT_SIZE = "10m"
# Bytes and an end mark: what `rankmesh prepare --tokenizer bytes` writes.
_BYTES_VOCAB = 257
_CONTEXT, _SAMPLE = 1024, 512


def run(args: argparse.Namespace) -> int:
    """Writes the config; returns 0. Raises UserError for a file that exists or values in error."""
    out = None if args.out == "-" else Path(args.out)
    asked = {word.partition("=")[0].strip() for word in args.overrides}
    given = load_config(None, args.overrides)
    model = _model(args.model, args.size, given)
    if out is not None and out.exists():
        raise UserError(f"{out}: exists already; choose another name with --out, or remove it")
    model = {key: value for key, value in model.items() if key not in asked}
    config = _loaded(model, args.overrides)
    start = config.model.init_from
    folder = None if start is None else weights_facts(Path(start))
    whole = model_spec(config.model, None if folder is None else folder.spec)
    # What comes from a folder is not repeated in the file.
    spec = whole if folder is None else None
    chosen = {**model, **_choices(given, whole, args.out)}
    chosen = {key: value for key, value in chosen.items() if key not in asked}
    config = _loaded(chosen, args.overrides)
    if spec is not None:
        check_fits(config, spec)
    text = config_text(
        config, spec, {*chosen, *asked}, _header(args, config, spec), everything=args.all
    )
    if out is None:
        print(text, end="")
    else:
        _write(out, text)
        print(f"{out}: {_described(config, spec)}")
        tokenizer = config.data.tokenizer or (folder and folder.tokenizer) or BYTES
        words = ["--tokenizer", tokenizer, "--out", prefixes(config.data.train)[0]]
        print(f"next: rankmesh prepare FILES {shlex.join(words)}")
        print(f"then: rankmesh train {out}")
    return 0


def _loaded(chosen: Mapping[str, Any], overrides: list[str]) -> RunConfig:
    words = [f"{key}={toml_value(value)}" for key, value in chosen.items()]
    return load_config(None, [*words, *overrides])


def _model(name: str, size: str | None, given: RunConfig) -> dict[str, Any]:
    """The keys of [model] that MODEL and --size stand for. Raises ConfigError."""
    if name in FAMILIES and (size is not None or name not in names()):
        known = {key: value for key, value in asdict(given.model).items() if value is not None}
        spec = shape_for(
            parse_size(size or _DEFAULT_SIZE),
            {"family": name, "vocab_size": _BYTES_VOCAB, "max_seq_len": _CONTEXT, **known},
        )
        sizes = ("num_layers", "hidden_size", "num_heads", "vocab_size", "max_seq_len")
        return {f"model.{key}": getattr(spec, key) for key in ("family", *sizes)}
    folder = Path(name).is_dir()
    if size is not None and (folder or name in names()):
        raise ConfigError(
            f"--size {size}: only a family has a size to choose ({', '.join(FAMILIES)}); "
            f"{name} has its own"
        )
    if name in names():
        return {"model.preset": name}
    if folder:
        return {"model.init_from": name}
    alike = [preset for preset in names() if preset.startswith(f"{name}-")]
    hint = f"; presets: {', '.join(alike)}" if alike else nearest(name, [*names(), *FAMILIES])
    raise ConfigError(f"{name} is no preset, family or folder{hint}")


def _choices(given: RunConfig, spec: ModelSpec, out: str) -> dict[str, Any]:
    """What a run needs or had better have, beside the model."""
    return {
        "data.train": ["data/train"],
        "data.seq_len": min(_SAMPLE, spec.max_seq_len),
        "optimizer.min_lr": float(f"{given.optimizer.lr / 10:.6g}"),
        "optimizer.warmup_steps": min(100, given.decay_steps // 10),
        "log.run_dir": default_run_dir(out),
    }


def _header(args: argparse.Namespace, config: RunConfig, spec: ModelSpec | None) -> list[str]:
    words = ["rankmesh", "init", args.model, *args.overrides]
    words += ["--size", args.size] if args.size else []
    return [
        f"Made by `{shlex.join(words)}`: {_described(config, spec)}.",
        "A line that starts with # and a key holds its default: take the # away to change it.",
        "More of a key: `rankmesh config explain optimizer.lr`. To train: `rankmesh train FILE`.",
    ]


def _described(config: RunConfig, spec: ModelSpec | None) -> str:
    if spec is None:
        return f"the model in {config.model.init_from}"
    return f"{spec.family}, {count_params(spec).total:,} parameters"


def _write(path: Path, text: str) -> None:
    made = False
    try:
        # "x": a file that has come about since the check is not overwritten either.
        with path.open("x", encoding="utf-8") as file:
            made = True
            file.write(text)
    except OSError as error:
        if made:
            path.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {reason(error)}") from error
