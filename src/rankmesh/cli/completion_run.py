"""The body of `rankmesh completion`: the words of our command line as a script of a shell.

Owns the three shells' languages. What can stand where is read off the parsers elsewhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence

from rankmesh.cli.completion_words import Place, places
from rankmesh.config.names import KEYS, SECTIONS

_TOP = ("--help", "--version")


def run(args: argparse.Namespace) -> int:
    """Prints the script; returns 0."""
    print(SCRIPTS[args.shell](places()), end="")
    return 0


def bash(found: Sequence[Place]) -> str:
    """For bash: one function, with the words of each place in a table."""
    lines = [
        "# Completion of rankmesh for bash: source it.",
        "_rankmesh() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        '    local place="${COMP_WORDS[1]}" options="" words="" keys=""',
        "    COMPREPLY=()",
        "    if ((COMP_CWORD == 1)); then",
        f'        COMPREPLY=($(compgen -W "{" ".join((*_commands(found), *_TOP))}" -- "$word"))',
        "        return",
        "    fi",
        *_bash_parts(found),
        '    case "$place $before" in',
        *_bash_values(found),
        "    esac",
        '    case "$place" in',
        *(_bash_place(place) for place in found),
        "    esac",
        "    if [[ $word == -* ]]; then",
        '        COMPREPLY=($(compgen -W "$options" -- "$word"))',
        "        return",
        "    fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "    if [[ -n $keys && -z ${COMPREPLY[*]} && $word ]]; then",
        '        COMPREPLY=($(compgen -W "$keys" -- "$word"))',
        "        [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace",
        "    fi",
        "}",
        # Without an answer of ours, names of files.
        "complete -o default -F _rankmesh rankmesh",
    ]
    return _text(lines)


def _bash_parts(found: Sequence[Place]) -> list[str]:
    """`place` gets its second word where the command has parts."""
    with_parts = "|".join(place.path for place in found if place.parts)
    if not with_parts:
        return []
    return [f'    case "$place" in {with_parts})',
            '        ((COMP_CWORD > 2)) && place+=" ${COMP_WORDS[2]}" ;;',
            "    esac"]  # fmt: skip


def _bash_values(found: Sequence[Place]) -> Iterable[str]:
    for place in found:
        for option in place.options:
            cases = "|".join(f'"{place.path} {name}"' for name in option.names)
            if option.choices:
                words = " ".join(option.choices)
                yield f'        {cases}) COMPREPLY=($(compgen -W "{words}" -- "$word")); return ;;'
            elif option.takes:
                yield f"        {cases}) return ;;"


def _bash_place(place: Place) -> str:
    options = " ".join(name for option in place.options for name in option.names)
    words = " ".join((*place.parts, *place.words))
    keys = " ".join(_keys(place))
    return f'        "{place.path}") options="{options}" words="{words}" keys="{keys}" ;;'


def zsh(found: Sequence[Place]) -> str:
    """For zsh: to be sourced after compinit, or saved as _rankmesh in a folder of $fpath."""
    commands = {place.path: place.help for place in found if " " not in place.path}
    lines = [
        "#compdef rankmesh",
        "_rankmesh() {",
        '    local place="$words[2]" before="$words[CURRENT-1]"',
        "    local -a found keys",
        "    if ((CURRENT == 2)); then",
        f"        found=({_zsh_words({**commands, '--help': '', '--version': ''})})",
        "        _describe command found",
        "        return",
        "    fi",
        *_zsh_parts(found),
        '    case "$place $before" in',
        *_zsh_values(found),
        "    esac",
        '    case "$place" in',
        *(line for place in found for line in _zsh_place(place)),
        "    esac",
        "}",
        'if [[ $funcstack[1] == _rankmesh ]]; then _rankmesh "$@"',
        "else compdef _rankmesh rankmesh; fi",
    ]
    return _text(lines)


def _zsh_parts(found: Sequence[Place]) -> list[str]:
    with_parts = "|".join(place.path for place in found if place.parts)
    if not with_parts:
        return []
    return [f"    case $place in ({with_parts})",
            '        ((CURRENT > 3)) && place+=" $words[3]" ;;',
            "    esac"]  # fmt: skip


def _zsh_values(found: Sequence[Place]) -> Iterable[str]:
    for place in found:
        for option in place.options:
            cases = "|".join(f"'{place.path} {name}'" for name in option.names)
            if option.choices:
                yield f"        ({cases}) compadd -- {' '.join(option.choices)}; return ;;"
            elif option.takes:
                yield f"        ({cases}) _files; return ;;"


def _zsh_place(place: Place) -> list[str]:
    options = {name: option.help for option in place.options for name in option.names}
    words = {**place.parts, **dict.fromkeys(place.words, "")}
    lines = [
        f"        ('{place.path}')",
        "            if [[ $PREFIX == -* ]]; then",
        f"                found=({_zsh_words(options)})",
        "                _describe option found",
        "                return",
        "            fi",
    ]
    if words:
        lines += [f"            found=({_zsh_words(words)})", "            _describe word found"]
    if _keys(place):
        # A key is followed by its value at once, a bare key by a space.
        joined = "-S ''" if place.assigns else ""
        lines += [f"            keys=({' '.join(_keys(place))})",
                  f"            [[ -n $PREFIX ]] && compadd {joined} -a keys"]  # fmt: skip
    if not words and not place.keys:
        lines.append("            _files")
    return [*lines, "            ;;"]


def _zsh_words(words: Mapping[str, str]) -> str:
    """`word:meaning` entries for `_describe`, quoted."""
    entries = [f"{word}:{_plain(help)}" if help else word for word, help in words.items()]
    return " ".join(_quoted(entry) for entry in entries)


def fish(found: Sequence[Place]) -> str:
    """For fish: one `complete` a word."""
    lines = ["# Completion of rankmesh for fish: save it in ~/.config/fish/completions."]
    first = "-n __fish_use_subcommand"
    for name in _TOP:
        lines.append(f"complete -c rankmesh -f {first} -l {name.removeprefix('--')}")
    for place in found:
        if " " not in place.path:
            help = _fish_quoted(place.help)
            lines.append(f"complete -c rankmesh -f {first} -a {place.path} -d {help}")
    for place in found:
        lines += _fish_place(place)
    return _text(lines)


def _fish_place(place: Place) -> list[str]:
    command, _, part = place.path.partition(" ")
    seen = f"__fish_seen_subcommand_from {command}"
    if part:
        seen += f"; and __fish_seen_subcommand_from {part}"
    here = f"complete -c rankmesh -n {_fish_quoted(seen)}"
    lines = []
    for option in place.options:
        flags = " ".join(
            f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names
        )
        value = f" -x -a {_fish_quoted(' '.join(option.choices))}" if option.choices else ""
        value = value or (" -r" if option.takes else "")
        lines.append(f"{here} {flags}{value} -d {_fish_quoted(_plain(option.help))}")
    if place.parts:
        none = f"{seen}; and not __fish_seen_subcommand_from {' '.join(place.parts)}"
        for word, help in place.parts.items():
            told = f"-a {word} -d {_fish_quoted(_plain(help))}"
            lines.append(f"complete -c rankmesh -f -n {_fish_quoted(none)} {told}")
    if place.words:
        lines.append(f"{here} -f -a {_fish_quoted(' '.join(place.words))}")
    if _keys(place):
        lines.append(f"{here} -a {_fish_quoted(' '.join(_keys(place)))}")
    return lines


def _commands(found: Sequence[Place]) -> list[str]:
    return [place.path for place in found if " " not in place.path]


def _keys(place: Place) -> tuple[str, ...]:
    """Config keys as they are typed here."""
    if place.assigns:
        return tuple(f"{key}=" for key in KEYS)
    return (*SECTIONS, *KEYS) if place.keys else ()


def _plain(help: str) -> str:
    """A help text as argparse would print it."""
    return help.replace("%%", "%")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _text(lines: Iterable[str]) -> str:
    return "\n".join([*lines, ""])


SCRIPTS: Mapping[str, Callable[[Sequence[Place]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
