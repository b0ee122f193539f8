"""Tokens of a text, or given as ids."""

from __future__ import annotations

import argparse
import re
from typing import Any

import torch
from moe_core import CheckpointError, ConfigError
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from moe_transformers.commands.model import of_transformers


def tokenizer_of(args: argparse.Namespace) -> Any:
    """Load the checkpoint's tokenizer, None if the arguments give token ids.

    Args:
        args: parsed arguments.

    Returns:
        The tokenizer, or None.

    Raises:
        CheckpointError: the checkpoint has no tokenizer that transformers can load.
    """
    if args.ids:
        return None
    none = f"{args.path} has no tokenizer that transformers reads: give token ids with --ids"
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.path)
    except Exception as error:  # tokenizers raise different exceptions for missing or broken files
        text = " ".join(str(error).split())
        raise CheckpointError(none, details=f"{type(error).__name__}: {text}") from error
    # without its files, transformers builds a tokenizer with an empty vocabulary
    if not any((args.path / name).exists() for name in tokenizer.vocab_files_names.values()):
        raise CheckpointError(none)
    return tokenizer


def tokens_of(args: argparse.Namespace, tokenizer: Any, text: str, name: str) -> Tensor:
    """Convert the text of an argument to token ids.

    Args:
        args: parsed arguments.
        tokenizer: the tokenizer; None if ``text`` lists token ids.
        text: text or token ids.
        name: name of the argument, for errors.

    Returns:
        int64 [T].

    Raises:
        ConfigError: there are no tokens, or ids outside the model's vocabulary.
    """
    ids = _parsed(text, name) if tokenizer is None else tokenizer(text, verbose=False)["input_ids"]
    if not ids:
        raise ConfigError(f"{name} has no tokens")
    with of_transformers(args):
        size = AutoConfig.from_pretrained(args.path).get_text_config().vocab_size
    if type(size) is not int or size < 1:
        raise CheckpointError(f"config.json of {args.path} : vocab_size is {size!r}, expected a positive integer")
    wrong = next((number for number in ids if not 0 <= number < size), None)
    if wrong is not None:
        raise ConfigError(f"{name} contains the token id {wrong}, expected 0 to {size - 1} (vocab_size)")
    return torch.tensor(ids)


def _parsed(text: str, name: str) -> list[int]:
    words = text.replace(",", " ").split()
    wrong = next((word for word in words if not re.fullmatch(r"[+-]?[0-9]{1,18}", word)), None)
    if wrong is not None:
        raise ConfigError(
            f"{name} contains {wrong[:40]!r}, which is not a token id; with --ids, expected ids only, e.g. 1 2 3"
        )
    return [int(word) for word in words]
