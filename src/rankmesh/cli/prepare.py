"""The options of `rankmesh prepare`. Its body, which needs numpy and rich, is in prepare_run.py."""

from __future__ import annotations

import argparse

from rankmesh.data.inputs import KINDS

HELP = "text, JSON lines or parquet -> token files (Megatron's .bin/.idx)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="text files, JSON lines (both also .gz and .zst), parquet, folders of them, or quoted "
        "patterns such as 'data/**/*.jsonl'",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="T",
        help="'bytes', a Hugging Face tokenizer.json, or a folder that has one",
    )
    parser.add_argument(
        "--out", required=True, metavar="PREFIX", help="writes PREFIX.bin, .idx and .meta.json"
    )
    parser.add_argument(
        "--format",
        choices=KINDS,
        default="auto",
        help="auto: .jsonl .ndjson .json are JSON lines, .parquet is parquet, other files are one "
        "document each",
    )
    parser.add_argument(
        "--jsonl-key",
        default="text",
        metavar="KEY",
        help="key of the text in JSON lines, its column in parquet (default: text)",
    )
    _add_marks(parser)
    parser.add_argument(
        "--strict", action="store_true", help="stop at the first bad document, naming file and line"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that encode; 0: none but this one (default: one a core, fewer for little "
        "input); the files written are the same for any number",
    )
    parser.add_argument("--json", action="store_true", help="print the statistics as JSON")


def _add_marks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the tokenizer's end mark (default: yes)",
    )
    parser.add_argument(
        "--prepend-bos",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="begin each document with the tokenizer's begin mark (default: no)",
    )
    parser.add_argument(
        "--eod-token", metavar="TOKEN", help="the end mark of a tokenizer.json that names none"
    )
    parser.add_argument(
        "--bos-token", metavar="TOKEN", help="the begin mark of a tokenizer.json that names none"
    )
