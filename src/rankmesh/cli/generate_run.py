"""The body of `rankmesh generate`: weights, tokenizer and sampler put together, and the print."""

from __future__ import annotations

import argparse
import json

import torch

from rankmesh.checkpoint.source import WeightSource, open_weights
from rankmesh.data.tokenizer import Tokenizer, load_tokenizer
from rankmesh.errors import ConfigError, DataError
from rankmesh.train.generate import Sampling, generate, load_model


def run(args: argparse.Namespace) -> int:
    """Prints the prompt and what follows; raises UserError for weights or options in error."""
    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    if args.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens is {args.max_new_tokens}; allowed: at least 1")
    source = open_weights(args.checkpoint)
    tokenizer = _tokenizer(source, args.tokenizer)
    prompt = _prompt(tokenizer, args.prompt, args.bos_id)
    tokens = list(
        generate(
            load_model(source, _device(args.device)),
            prompt,
            max_new_tokens=args.max_new_tokens,
            context=source.spec.max_seq_len,
            sampling=sampling,
            seed=args.seed,
            vocab_size=tokenizer.vocab_size,
            stop_id=tokenizer.eod_id,
        )
    )
    text = tokenizer.decode([*prompt, *tokens])
    if args.json:
        print(json.dumps({"prompt": args.prompt, "text": text, "tokens": tokens}))
    else:
        print(text)
    return 0


def _tokenizer(source: WeightSource, named: str | None) -> Tokenizer:
    spec = named or source.tokenizer
    if spec is None:
        raise DataError(
            f"{source.folder}: no tokenizer beside the weights; give --tokenizer "
            "(bytes, a tokenizer.json or a folder with one)"
        )
    return load_tokenizer(spec)


def _prompt(tokenizer: Tokenizer, text: str, bos_id: int | None) -> list[int]:
    """Ids of the prompt; without one, the end-of-document mark after which a text begins."""
    ids = [*([] if bos_id is None else [bos_id]), *tokenizer.encode(text)]
    if not ids and tokenizer.eod_id is not None:
        return [tokenizer.eod_id]
    return ids


def _device(named: str | None) -> torch.device:
    try:
        device = torch.device(named or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ConfigError(f"--device is {named!r}; allowed: cpu, cuda, cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device is {named!r}, but torch sees no CUDA device here")
    return device
