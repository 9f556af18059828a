"""Which values are secret by their name, and how they are masked.

Owns that rule, for data and for text. It knows no file and no key of ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MASK = "***"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_WORDS = {"token", "secret", "password", "passwd", "passphrase", "apikey"}
_NAME = re.compile(r"""(?P<name>[\w.-]+)["']?\s*[=:]\s*""")
_VALUE = re.compile(r"""("[^"]*"|'[^']*'|[^\s"']\S*)""")
_NUMBER = re.compile(r"[-+]?[\d_,.]+(e[-+]?\d+)?[,;.)]?", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether one of the words in `name` says token, secret, password or API key.

    `hf_token`, `HF_TOKENS` and `apiKey` do; `tokenizer` does not.
    """
    words = [word.lower().removesuffix("s") for word in _WORDS.findall(name)]
    return not _SECRET_WORDS.isdisjoint(words) or ("api", "key") in zip(
        words, words[1:], strict=False
    )


def masked(value: object, name: str = "") -> object:
    """`value` with every text under a secret name replaced, at any depth; numbers are counts, not
    secrets.
    """
    if isinstance(value, Mapping):
        return {
            key: masked(item, name if is_secret(name) else str(key)) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [masked(item, name) for item in value]
    return MASK if isinstance(value, str) and is_secret(name) else value


def mask_text(text: str) -> str:
    """`text` with the values of `name=value` and `name: value` masked where the name is secret."""
    pieces, done = [], 0
    for found in _NAME.finditer(text):
        value = _VALUE.match(text, found.end())
        if found.end() < done or value is None or not is_secret(found["name"]):
            continue
        if not _NUMBER.fullmatch(value[0]):
            pieces += [text[done : found.end()], MASK]
            done = value.end()
    return "".join([*pieces, text[done:]])
