"""What each key means, for help texts and the documentation.

Owns the description of keys, taken from the dataclasses alone. It knows no key by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rankmesh.config.fields import doc_of, rule_of
from rankmesh.config.names import unknown_key
from rankmesh.config.schema import RunConfig
from rankmesh.config.toml import toml_value
from rankmesh.config.types import describe, walk_keys

_BEGIN = "<!-- keys: generated -->"
_END = "<!-- end of keys -->"


@dataclass(frozen=True, kw_only=True)
class KeyInfo:
    """One key: its type and rule in words, its default as TOML ("" where there is none), its doc
    string.
    """

    key: str
    type: str
    rule: str
    default: str
    doc: str

    @property
    def allowed(self) -> str:
        """Type and rule together."""
        if self.rule.startswith("one of") and not self.type.startswith("a list"):
            return self.rule
        return f"{self.type} {self.rule}".strip()

    def __str__(self) -> str:
        default = f"; default {self.default}" if self.default else ""
        return f"{self.key}: {self.doc} ({self.allowed}{default})"


def keys() -> tuple[KeyInfo, ...]:
    """All keys of a config, in the order of the schema."""
    return tuple(
        KeyInfo(
            key=key,
            type=describe(hint),
            rule=str(rule_of(entry)),
            default="" if entry.default is None else toml_value(entry.default),
            doc=doc_of(entry),
        )
        for key, hint, entry in walk_keys(RunConfig)
    )


def explain(key: str) -> KeyInfo:
    """What `section.key` means. Raises ConfigError naming the nearest key."""
    found = {info.key: info for info in keys()}
    if key not in found:
        raise unknown_key(key)
    return found[key]


def keys_table() -> str:
    """A Markdown table for each section, between the marks that docs/config.md has."""
    lines = [_BEGIN]
    section = ""
    for info in keys():
        name, _, key = info.key.rpartition(".")
        if name != section:
            section = name
            lines += [
                "",
                f"### [{name}]",
                "",
                "| key | value | default | meaning |",
                "|---|---|---|---|",
            ]
        default = f"`{info.default}`" if info.default else ""
        lines.append(f"| `{key}` | {info.allowed} | {default} | {info.doc} |")
    return "\n".join([*lines, "", _END])


def update_docs(path: str | Path) -> bool:
    """Put the current tables between the marks of a page; returns whether that changed it."""
    page = Path(path).read_text(encoding="utf-8")
    before, _, rest = page.partition(_BEGIN)
    after = rest.partition(_END)[2]
    updated = f"{before}{keys_table()}{after}"
    if updated != page:
        Path(path).write_text(updated, encoding="utf-8")
    return updated != page
