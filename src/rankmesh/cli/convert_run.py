"""The body of `rankmesh convert`: source, target and what comes along, put together."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from rankmesh.checkpoint.convert import write_ours
from rankmesh.checkpoint.hf_carry import carried, files_beside, like_folder
from rankmesh.checkpoint.hf_read import HFFolder
from rankmesh.checkpoint.hf_write import write_hf
from rankmesh.checkpoint.source import open_weights
from rankmesh.checkpoint.weights import Weights
from rankmesh.errors import ConfigError
from rankmesh.specs.placement import num_params

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run(args: argparse.Namespace) -> int:
    """Converts; prints what was made. Raises UserError, before anything is written, for weights
    that cannot be read or that the target cannot express.
    """
    dtype = _DTYPES[args.dtype] if args.dtype else None
    source = open_weights(args.source)
    assert isinstance(source, HFFolder | Weights)
    if args.target.resolve().is_relative_to(source.folder.resolve()):
        raise ConfigError(
            f"{args.target}: lies inside the source {source.folder}; choose a folder elsewhere"
        )
    facts: dict[str, Any] = {
        "source": str(source.folder),
        "target": str(args.target),
        "format": args.to,
        "family": source.spec.family,
        "parameters": num_params(source.spec),
    }
    if args.to == "hf":
        beside = files_beside(source) if args.like is None else like_folder(args.like)
        written = write_hf(
            args.target, source, beside, dtype=dtype, shard_bytes=_bytes(args.shard_gb)
        )
        facts |= {"tensors": written.tensors, "bytes": written.bytes, "files": written.files}
    else:
        _refuse("--shard-gb", args.shard_gb)
        _refuse("--like", args.like)
        write_ours(args.target, source, carried(source), dtype=dtype)
    print(json.dumps(facts) if args.json else _line(facts))
    return 0


def _bytes(gigabytes: float | None) -> int | None:
    if gigabytes is None:
        return None
    if not 0 < gigabytes < 1e6:
        raise ConfigError(f"--shard-gb is {gigabytes:g}; allowed: a number above 0")
    return max(1, int(gigabytes * 1e9))


def _refuse(option: str, value: float | Path | None) -> None:
    if value is not None:
        raise ConfigError(f"{option} {value}: only for --to hf")


def _line(facts: dict[str, Any]) -> str:
    files = f" in {len(facts['files'])} files" if len(facts.get("files", ())) > 1 else ""
    return (
        f"{facts['target']}: {facts['family']}, {facts['parameters']:,} parameters{files}, from "
        f"{facts['source']}"
    )
