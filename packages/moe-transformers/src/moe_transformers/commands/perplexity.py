"""moe perplexity: how well a whole model predicts a text."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from moe_core import Checkpoint, CheckpointError, ConfigError
from moe_core.api.commands import duration, emit, progress, seconds_since
from torch import Tensor
from transformers import AutoConfig

from moe_transformers.command_line import check_windows as _check
from moe_transformers.commands.model import Loaded, load, of_transformers, rate, summary
from moe_transformers.commands.tokens import tokenizer_of, tokens_of

#: rows of logits converted to float32 at a time
_ROWS = 256


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code, 1 if the model's output is not finite.

    Args:
        args: parsed arguments.
    """
    # validate the text before gigabytes are read
    Checkpoint.open(args.path)
    tokens = tokens_of(args, tokenizer_of(args), _read(args), "--text")[: args.max_tokens]
    if len(tokens) < 2:
        raise ConfigError(f"--text {args.text} has {len(tokens)} token, expected 2 or more: one to predict another")
    with of_transformers(args):
        config = AutoConfig.from_pretrained(args.path).get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and (type(longest) is not int or longest < 2):
        raise CheckpointError(
            f"config.json of {args.path} : max_position_embeddings is {longest!r}, expected an integer of 2 or more"
        )
    window = _check(args, longest)
    loaded = load(args)
    spans = list(windows(len(tokens), window, args.stride or window))
    total, scored, start = 0.0, 0, time.perf_counter()
    for number, (begin, first, end) in enumerate(spans, 1):
        with progress(f"window {number} of {len(spans)}"), of_transformers(args, "run"):
            total += negative_log_likelihood(loaded, tokens[begin:end], end - first)
        scored += end - first
    seconds = seconds_since(start)
    mean = total / scored
    data = {
        "checkpoint": str(args.path),
        **loaded.as_dict(),
        "text": str(args.text),
        "tokens": len(tokens),
        "scored_tokens": scored,
        # these tokens have no predecessor in any window
        "skipped_tokens": len(tokens) - scored,
        "window": window,
        "stride": args.stride or window,
        "negative_log_likelihood": mean,
        "perplexity": _exp(mean),
        "seconds": seconds,
        "tokens_per_second": sum(end - begin for begin, _, end in spans) / seconds,
    }
    emit(args.json, data, _text(data))
    return 0 if math.isfinite(mean) else 1


def windows(count: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, first scored token, end) of every window; each token is scored at most once.

    The first token of a window has no context there. It is scored in an earlier window that contains it, or not at all.

    Args:
        count: number of tokens.
        window: maximum tokens per window.
        stride: distance between the starts of windows.
    """
    done = 0
    for begin in range(0, count, stride):
        end = min(begin + window, count)
        first = max(done, begin + 1)
        if first < end:
            yield begin, first, end
        done = end
        if end == count:
            return


@torch.inference_mode()
def negative_log_likelihood(loaded: Loaded, tokens: Tensor, count: int) -> float:
    """Sum the negative log-likelihood of the last ``count`` tokens, in nats.

    Args:
        loaded: the model.
        tokens: token ids [T].
        count: number of tokens to score, each predicted from all tokens before it.

    Returns:
        The sum over the scored tokens.
    """
    ids = tokens.to(loaded.device)
    logits = loaded.model(ids[None], use_cache=False).logits[0, -count - 1 : -1]
    targets = ids[-count:].to(logits.device)
    total = 0.0
    for place in range(0, count, _ROWS):
        rows = slice(place, place + _ROWS)
        total += float(torch.nn.functional.cross_entropy(logits[rows].float(), targets[rows], reduction="sum"))
    return total


def _read(args: argparse.Namespace) -> str:
    try:
        text: str = args.text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {args.text} is not valid UTF-8: {error.reason} at byte {error.start}") from None
    return text


def _unscored(data: dict[str, Any]) -> str:
    """Describe the windows whose first token is not scored, since it has no predecessor."""
    return "the text" if data["skipped_tokens"] == 1 else f"each of {data['skipped_tokens']} windows"


def _exp(mean: float) -> float:
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf


def _text(data: dict[str, Any]) -> str:
    return (
        f"perplexity {data['perplexity']:.4f} of {data['scored_tokens']} tokens of {data['text']} "
        f"(windows of {data['window']}, {data['stride']} apart; every token but the first of {_unscored(data)})\n"
        f"{summary(data)}\n"
        f"{data['tokens']} tokens in {duration(data['seconds'])} ({rate(data['tokens_per_second'])})"
    )
