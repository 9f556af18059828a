"""`rankmesh prepare`: its flags and the statistics it prints. All work is in `data/prepare.py`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from rankmesh.data.prepare import Prepared, PrepareOptions, prepare

HELP = "text or JSON lines -> token files (Megatron's .bin/.idx)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs", nargs="+", type=Path, metavar="FILE", help="text files and JSON lines"
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
        choices=("auto", "text", "jsonl"),
        default="auto",
        help="auto: .jsonl .ndjson .json are JSON lines, other files one document each",
    )
    parser.add_argument(
        "--jsonl-key", default="text", metavar="KEY", help="key of the text (default: text)"
    )
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the tokenizer's end mark (default: yes)",
    )
    parser.add_argument(
        "--eod-token", metavar="TOKEN", help="the end mark of a tokenizer.json that names none"
    )
    parser.add_argument(
        "--strict", action="store_true", help="stop at the first bad document, naming file and line"
    )
    parser.add_argument("--json", action="store_true", help="print the statistics as JSON")


def run(args: argparse.Namespace) -> int:
    """Prepares, prints the statistics, returns 0. Raises DataError if the input is wrong."""
    options = PrepareOptions(
        inputs=tuple(args.inputs),
        tokenizer=args.tokenizer,
        out=args.out,
        kind=args.format,
        jsonl_key=args.jsonl_key,
        append_eod=args.append_eod,
        eod_token=args.eod_token,
        strict=args.strict,
    )
    done = prepare(options)
    if args.json:
        print(
            json.dumps({**dataclasses.asdict(done.meta), "out": args.out, "seconds": done.seconds})
        )
    else:
        print("\n".join(_report(done, args.out)))
    return 0


def _report(done: Prepared, out: str) -> list[str]:
    meta = done.meta
    lines = [
        f"{out}.bin: {meta.num_tokens:,} tokens in {meta.num_documents:,} documents "
        f"(vocabulary {meta.vocab_size:,}, largest id {meta.max_token:,})",
        f"{meta.text_bytes:,} bytes of text, {meta.text_bytes / meta.num_tokens:.2f} a token; "
        f"{done.seconds:.1f} s, {meta.num_tokens / done.seconds:,.0f} tokens/s",
    ]
    total = sum(meta.skipped.values())
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in meta.skipped.items())
    return [*lines, f"skipped {total:,}: {reasons}" if total else "skipped 0"]
