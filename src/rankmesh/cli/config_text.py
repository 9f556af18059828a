"""A config as a file that explains itself: every key with its meaning, rule and default.

Owns which keys everyone meets and the layout. Meanings, defaults and rules come from the schema.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rankmesh.config.explain import KeyInfo, keys
from rankmesh.config.names import SECTIONS
from rankmesh.config.schema import RunConfig
from rankmesh.config.toml import toml_value
from rankmesh.specs.model import ModelSpec

_WIDTH = 100

# The keys that everyone meets; the others are written where they are asked for.
COMMON: Mapping[str, str] = {
    "model": "preset init_from family num_layers hidden_size num_heads num_kv_heads ffn_size "
    "vocab_size max_seq_len tie_embeddings dropout",
    "parallel": "tp cp ep etp pp dp num_chunks schedule layout sequence_parallel zero recompute",
    "data": "train valid test split seq_len tokenizer seed",
    "optimizer": "name lr min_lr schedule warmup_steps decay_steps betas eps weight_decay "
    "clip_grad",
    "train": "steps global_batch_size microbatch_size dtype seed eval_every eval_steps resume",
    "checkpoint": "every keep keep_every",
    "log": "run_dir every trackers timeout_s",
}


def config_text(
    config: RunConfig,
    spec: ModelSpec | None,
    written: Collection[str],
    header: Sequence[str],
    *,
    everything: bool,
) -> str:
    """TOML that loads back as `config`.

    written: the dotted keys that the file sets; each other one is a comment with the value that
    holds without it, for the model's fields that of `spec`. header: lines at the top. everything:
    not only the common keys.
    """
    lines = [part for line in header for part in _comment(line)]
    for section in SECTIONS:
        lines += ["", f"[{section}]"]
        for info in keys():
            name = info.key.removeprefix(f"{section}.")
            common = name in COMMON.get(section, "").split()
            if name != info.key and (everything or common or info.key in written):
                lines += _key(info, name, _value(config, info.key), _default(info, spec), written)
    return "\n".join([*lines, ""])


def _key(
    info: KeyInfo, name: str, value: Any, default: str, written: Collection[str]
) -> Iterator[str]:
    """The comment and the line of one key; a table has no line, only its keys do."""
    if info.type == "a table":
        return
    told = f"; default {info.default}" if info.default and info.key in written else ""
    yield from _comment(f"{info.doc} ({info.allowed}{told})")
    if info.key in written and value is not None:
        yield f"{name} = {toml_value(value)}"
    else:
        yield f"#{name} = {default}".rstrip()


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH - 2)]


def _value(config: RunConfig, key: str) -> Any:
    """The config's value under a dotted key; None inside a table that is not set."""
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name) if found is not None else None
    return found


def _default(info: KeyInfo, spec: ModelSpec | None) -> str:
    """The value that holds where the key is not written: TOML, "" where there is none."""
    section, _, name = info.key.partition(".")
    if section == "model" and spec is not None:
        value = getattr(spec, name, None)
        return "" if value is None else toml_value(value)
    return info.default
