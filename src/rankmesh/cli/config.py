"""The options of `rankmesh config`. Its body is in config_run.py."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the parts of the command."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="explain|schema")
    explain = parts.add_parser(
        "explain",
        help="meaning, value and default of a key or of a whole section",
        description="meaning, value and default of a key or of a whole section",
        allow_abbrev=False,
    )
    explain.add_argument(
        "keys", metavar="KEY", nargs="+", help="section.key, such as optimizer.lr, or a section"
    )
    explain.add_argument("--json", action="store_true", help="print a JSON list of objects")
    parts.add_parser(
        "schema",
        help="the whole config as JSON Schema, for editors",
        description="the whole config as JSON Schema (draft 2020-12), for editors",
        allow_abbrev=False,
    )
