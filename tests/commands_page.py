"""Writes the reference in docs/commands.md from the parsers: `python -m tests.commands_page` renews
it, and a rule compares the two.
"""

import argparse
import sys
from collections.abc import Iterator

from rankmesh.cli.main import COMMANDS, parser_of
from tests.rules import tree

PAGE = tree.ROOT / "docs" / "commands.md"
MARKS = ("<!-- reference: generated -->", "<!-- end of reference -->")


def page_text(page: str) -> str:
    """The page with the part between the marks renewed."""
    before, _, rest = page.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    blocks = [
        "\n".join(_command(parser_of(name), command.help))
        for name, command in COMMANDS.items()
        if not command.hidden
    ]
    return "\n\n".join([f"{before}{MARKS[0]}", *blocks, f"{MARKS[1]}{after}"])


def _command(parser: argparse.ArgumentParser, help: str, level: int = 3) -> Iterator[str]:
    """A heading, the usage, what each word means; then the command's parts in the same way."""
    yield f"{'#' * level} {parser.prog}"
    yield ""
    yield f"{help[0].upper()}{help[1:]}."
    formatter = argparse.HelpFormatter(parser.prog, width=10_000)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    usage = " ".join(formatter.format_help().split()).removeprefix("usage: ")
    yield from ("", "```text", usage, "```")
    rows = [(formatter._format_action_invocation(action), action) for action in _shown(parser)]
    if rows:
        yield from ("", "| word | meaning |", "|---|---|")
    for words, action in rows:
        yield f"| `{words}` | {_cell(action.help or '')} |"
    if parser.epilog and parser.formatter_class is argparse.HelpFormatter:
        yield from ("", parser.epilog)
    for part in _parts(parser):
        yield ""
        yield from _command(part, part.description or "", level + 1)


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    return [
        action
        for action in parser._actions
        if action.help != argparse.SUPPRESS and not isinstance(action, hidden)
    ]


def _parts(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return [part for action in found for part in action.choices.values()]


def _cell(text: str) -> str:
    return text.replace("%%", "%").replace("|", "\\|")


def main() -> int:
    """Renews the page."""
    PAGE.write_text(page_text(PAGE.read_text(encoding="ascii")), encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
