"""Owns the table of commands, how errors end a process, and nothing that a command does.

A command's file is loaded when that command is asked for: neither `rankmesh --help` nor
`rankmesh COMMAND --help` imports torch.
"""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from rankmesh.errors import RankmeshError, UserError, reason
from rankmesh.version import describe

__all__ = ["COMMANDS", "Command", "Parser", "main", "parser_of"]


@dataclass(frozen=True)
class Command:
    """Where a command lives.

    The module `arguments` has `add_arguments(parser)`, the module `body` has `run(args) -> int`,
    the exit code. They are one module, unless the body needs torch: help must not wait for that.
    `help` is its line in `rankmesh --help` and heads its own help.
    """

    help: str
    arguments: str
    body: str
    hidden: bool = False


def _command(name: str, help: str, *, body: str = "", hidden: bool = False) -> Command:
    module = f"rankmesh.cli.{name}"
    return Command(help=help, arguments=module, body=body or module, hidden=hidden)


COMMANDS = {
    "train": _command("train", "train a model from a config file", body="rankmesh.cli.train_run"),
    "map": _command(
        "map", "rank map and groups of any world, without processes", body="rankmesh.cli.map_run"
    ),
    "schedule": _command(
        "schedule",
        "a pipeline schedule drawn, with bubble and live activations",
        body="rankmesh.cli.schedule_run",
    ),
    "prepare": _command(
        "prepare",
        "turn text, JSON lines or parquet into token files",
        body="rankmesh.cli.prepare_run",
    ),
    "verify": _command(
        "verify", "compare a config's mesh with a single process", body="rankmesh.cli.verify_run"
    ),
    "doctor": _command(
        "doctor", "check machines, links and versions", body="rankmesh.cli.doctor_run"
    ),
    "generate": _command(
        "generate", "write text from trained weights", body="rankmesh.cli.generate_run"
    ),
    "convert": _command(
        "convert", "checkpoints to and from Hugging Face folders", body="rankmesh.cli.convert_run"
    ),
    "inspect": _command(
        "inspect",
        "what a checkpoint holds, and whether it is whole",
        body="rankmesh.cli.inspect_run",
    ),
    "eval": _command(
        "eval", "loss, perplexity and bits per byte of token files", body="rankmesh.cli.eval_run"
    ),
    "trace": _command(
        "trace", "the measured timeline of a traced run", body="rankmesh.cli.trace_run"
    ),
    "compare": _command("compare", "the first step and metric at which two runs differ"),
    "init": _command("init", "write a commented config", body="rankmesh.cli.init_run"),
    "config": _command("config", "what a key means; the schema", body="rankmesh.cli.config_run"),
    "completion": _command(
        "completion", "complete words in a shell", body="rankmesh.cli.completion_run"
    ),
    "demo": _command(
        "demo", "train a small model on this machine", body="rankmesh.cli.demo_run", hidden=True
    ),
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are `UserError`s, one line each."""

    def error(self, message: str) -> NoReturn:
        """Raises `UserError` with the message, the nearest option names and where to read on."""
        words = message.split() if message.startswith("unrecognized arguments:") else []
        options = [name for action in self._actions for name in action.option_strings]
        hints = [_nearest(word.partition("=")[0], options) for word in words]
        raise UserError(f"{message}{''.join(hints)} (see `{self.prog} --help`)")


def _nearest(word: str, names: Iterable[str]) -> str:
    """`; did you mean NAME?` for the closest of `names`, or nothing where none is close."""
    close = difflib.get_close_matches(word, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _overview() -> str:
    """What `rankmesh --help` prints."""
    shown = {name: command for name, command in COMMANDS.items() if not command.hidden}
    width = max(map(len, shown))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in shown.items()]
    return "\n".join(
        [
            "usage: rankmesh COMMAND ...",
            "       rankmesh COMMAND --help | --help | --version",
            "",
            "Trains transformer language models on a mesh of devices.",
            "",
            *lines,
        ]
    )


def parser_of(name: str) -> Parser:
    """The parser of a command of the table; loads nothing that help does not need."""
    command = COMMANDS[name]
    parser = Parser(prog=f"rankmesh {name}", description=command.help, allow_abbrev=False)
    importlib.import_module(command.arguments).add_arguments(parser)
    for action in parser._actions:
        # argparse calls a list that may be empty required, and says so where another word lacks.
        action.required = action.required and action.nargs != "*"
    return parser


def _dispatch(words: Sequence[str]) -> int:
    """Runs the command that `words` name; returns its exit code."""
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        print(describe())
        return 0
    name, *rest = words
    if name not in COMMANDS:
        hint = _nearest(name, COMMANDS)
        raise UserError(f"unknown command {name!r}{hint} (see `rankmesh --help`)")
    parser = parser_of(name)
    # Overrides may stand before and after options. argparse cannot do that with parts of commands.
    mixed = parser._subparsers is None
    args = parser.parse_intermixed_args(rest) if mixed else parser.parse_args(rest)
    return int(importlib.import_module(COMMANDS[name].body).run(args))


def _guarded(words: Sequence[str]) -> int:
    """`_dispatch`, with the exits of argparse as codes and everything printed pushed out."""
    try:
        code = _dispatch(words)
    except SystemExit as stop:  # argparse leaves this way after it has printed help
        code = stop.code if isinstance(stop.code, int) else 0
    sys.stdout.flush()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (`sys.argv` by default) and returns the exit code.

    0: done. 2: the user's input is wrong. 1: anything else. Both failures are one line on stderr;
    only an error that nobody foresaw leaves a traceback. 130: interrupted.
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        return _guarded(words)
    except RankmeshError as error:
        line = " ".join(str(error).split())
        print(f"rankmesh: error: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("rankmesh: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        # The reader (head, less) has gone, or a disk is full. Python flushes stdout once more at
        # exit: give that flush somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            where = f"{error.filename}: " if error.filename is not None else ""
            print(f"rankmesh: error: {where}{reason(error)}", file=sys.stderr)
        return 1
