"""Values as TOML text, for dumps and for error messages.

Owns how one value is written. It knows no section, no key and no file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

_SHOWN = 80


def toml_value(value: object) -> str:
    """`value` as a TOML value that reads back equal; other types (dates of a user's file) as they
    print.

    A mapping becomes an inline table, a tuple or list an array.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        # Python refuses to write huge integers in decimal; only error messages meet them.
        return str(value) if value.bit_length() <= 64 else hex(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        entries = (f"{toml_key(str(key))} = {toml_value(item)}" for key, item in value.items())
        return "{" + ", ".join(entries) + "}"
    return str(value)


def toml_key(name: str) -> str:
    """`name` bare where TOML allows it, else quoted."""
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else toml_value(name)


def shown(value: object) -> str:
    """`value` for an error message: TOML on one line, shortened."""
    text = ascii_line(toml_value(value))
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def ascii_line(text: str) -> str:
    """`text` on one line of ASCII: what a terminal or a log could choke on is escaped."""
    return "".join(c if " " <= c <= "~" else c.encode("unicode_escape").decode() for c in text)
