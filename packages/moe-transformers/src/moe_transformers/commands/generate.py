"""``moe generate``: generate text with a whole model and report throughput and memory use."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
from moe_core import Checkpoint
from moe_core.api.commands import duration, emit, progress, seconds_since
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from moe_transformers.commands.model import Loaded, load, of_transformers, rate, summary
from moe_transformers.commands.tokens import tokenizer_of, tokens_of


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Args:
        args: parsed arguments.
    """
    # validate the prompt before gigabytes are read
    Checkpoint.open(args.path)
    tokenizer = tokenizer_of(args)
    prompt = tokens_of(args, tokenizer, args.prompt, "--prompt")
    loaded = load(args)
    with progress("running the model once"):
        start = time.perf_counter()
        _generate(args, loaded, prompt, min(args.max_new_tokens, 2))
        first = seconds_since(start)
    with progress(f"generating up to {args.max_new_tokens} tokens"):
        timed = _generate(args, loaded, prompt, args.max_new_tokens)
    new = timed.tokens[:, len(prompt) :].tolist()
    data = {
        "checkpoint": str(args.path),
        **loaded.as_dict(),
        "batch": args.batch,
        "prompt_tokens": len(prompt),
        "new_tokens": len(new[0]),
        "text": None if tokenizer is None else tokenizer.batch_decode(new, skip_special_tokens=True),
        "token_ids": new,
        "seconds_first_call": first,
        "seconds_prefill": timed.prefill,
        "seconds_decode": timed.decode,
        "prefill_tokens_per_second": args.batch * len(prompt) / timed.prefill,
        # the first new token belongs to prefill
        "decode_tokens_per_second": args.batch * (len(new[0]) - 1) / timed.decode if len(new[0]) > 1 else None,
    }
    emit(args.json, data, _text(data))
    return 0


@dataclass(frozen=True)
class _Timed:
    """Tokens [batch, T], the seconds to the first new token, and those from there to the last."""

    tokens: Tensor
    prefill: float
    decode: float


class _Clock(StoppingCriteria):
    """Criterion that never stops but records when the first new token is ready."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.first: float | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if self.first is None:
            self.loaded.synchronize()
            self.first = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _generate(args: argparse.Namespace, loaded: Loaded, prompt: Tensor, count: int) -> _Timed:
    torch.manual_seed(args.seed)
    ids = prompt.to(loaded.device).expand(args.batch, -1)
    clock = _Clock(loaded)
    choice: dict[str, Any] = {"do_sample": False, "num_beams": 1} if args.greedy else {}
    loaded.synchronize()
    start = time.perf_counter()
    with of_transformers(args, "generate with"):
        tokens = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            pad_token_id=_pad(loaded.model),
            stopping_criteria=StoppingCriteriaList([clock]),
            **choice,
        )
        loaded.synchronize()
    end = time.perf_counter()
    first = end if clock.first is None else clock.first
    return _Timed(tokens.cpu(), first - start, end - first)


def _pad(model: Any) -> int:
    """Return the token that pads shorter continuations after their end."""
    config = model.generation_config
    end = config.eos_token_id
    found = config.pad_token_id if config.pad_token_id is not None else end[0] if isinstance(end, list) else end
    return 0 if found is None else int(found)


def _text(data: dict[str, Any]) -> str:
    texts = data["text"] or [" ".join(map(str, row)) for row in data["token_ids"]]
    decode = data["decode_tokens_per_second"]
    speed = "" if decode is None else f" ({rate(decode)})"
    batch, prompt, new = data["batch"], data["prompt_tokens"], data["new_tokens"]
    prefill = rate(data["prefill_tokens_per_second"])
    lines = (
        summary(data),
        f"prefill: {batch} x {prompt} tokens in {duration(data['seconds_prefill'])} ({prefill})",
        f"decode: {batch} x {new - 1} tokens in {duration(data['seconds_decode'])}{speed}",
    )
    return "\n\n".join((*texts, "\n".join(lines)))
