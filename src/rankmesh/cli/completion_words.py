"""What can stand where on our command line, as plain values read off the parsers.

Owns that reading. It knows no shell, and loads no more than help does.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from rankmesh.cli.main import COMMANDS, parser_of

OVERRIDES = "section.key=value"


@dataclass(frozen=True)
class Option:
    """One option. names: `--json` and so on. choices: what its value may be; () for anything.

    takes: whether a value follows.
    """

    names: tuple[str, ...]
    help: str
    takes: bool
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """What may follow the words of `path`, such as `train` or `config explain`.

    parts: word -> help of the parts of a command; then nothing else may follow. words: choices of
    the positional arguments. keys: whether config keys may stand here, bare or as `key=`.
    """

    path: str
    help: str
    options: tuple[Option, ...]
    words: tuple[str, ...]
    keys: bool
    assigns: bool
    parts: Mapping[str, str]


def places() -> list[Place]:
    """Every command that `rankmesh --help` shows, each followed by its parts."""
    shown = {name: command.help for name, command in COMMANDS.items() if not command.hidden}
    return [place for name, help in shown.items() for place in _places(name, parser_of(name), help)]


def _places(path: str, parser: argparse.ArgumentParser, help: str) -> list[Place]:
    """The place behind `path`, and those behind its parts."""
    words: list[str] = []
    parts: dict[str, argparse.ArgumentParser] = {}
    metavars = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parts = dict(action.choices)
        elif not action.option_strings:
            words += [str(choice) for choice in action.choices or ()]
            metavars.add(action.metavar)
    place = Place(
        path=path,
        help=help,
        options=tuple(_option(action) for action in parser._actions if _is_shown(action)),
        words=tuple(words),
        keys="KEY" in metavars,
        assigns=OVERRIDES in metavars,
        parts={name: part.description or "" for name, part in parts.items()},
    )
    below = [
        _places(f"{path} {name}", part, part.description or "") for name, part in parts.items()
    ]
    return [place, *(found for some in below for found in some)]


def _is_shown(action: argparse.Action) -> bool:
    return bool(action.option_strings) and action.help != argparse.SUPPRESS


def _option(action: argparse.Action) -> Option:
    return Option(
        names=tuple(action.option_strings),
        help=action.help or "",
        takes=action.nargs != 0,
        choices=tuple(str(choice) for choice in action.choices or ()),
    )
