"""Arguments that several commands take, with the same name and meaning."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Sequence
from typing import Any

from moe_core.cli.parser import MOST_TOKENS, at_least, one_of, path, whole

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: help text for commands that run something
DEVICE = "cpu, cuda, cuda:1 … (default: cuda if there is a GPU)"


def add_checkpoint(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add DIR, as ``path``.

    Args:
        parser: The command's parser.
        optional: Whether DIR may be omitted.
    """
    text = "checkpoint folder" if optional else "checkpoint folder: config.json and safetensors"
    parser.add_argument("path", metavar="DIR", type=path, nargs="?" if optional else None, help=text)


def add_tokens(parser: argparse.ArgumentParser, default: int, text: str, *, least: int = 1) -> None:
    """Add ``--tokens M``.

    Args:
        parser: The command's parser.
        default: Default number of tokens.
        text: Help text.
        least: Smallest number of tokens.
    """
    parser.add_argument("--tokens", type=at_least(least, MOST_TOKENS), default=default, metavar="M", help=text)


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Add ``--backend B``.

    Args:
        parser: The command's parser.
    """
    parser.add_argument("--backend", default="auto", metavar="B", help="a backend by name (default: auto)")


def add_device(parser: argparse.ArgumentParser, text: str = DEVICE) -> None:
    """Add ``--device D``: a name, or None.

    Args:
        parser: The command's parser.
        text: Help text.
    """
    parser.add_argument("--device", metavar="D", help=text)


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """Add ``--quantize NAME``.

    Args:
        parser: The command's parser.
    """
    parser.add_argument("--quantize", metavar="NAME", help="quantize 16-bit experts at load, e.g. fp8_per_channel")


def add_activation_key(parser: argparse.ArgumentParser) -> None:
    """Add ``--activation-key NAME``.

    Args:
        parser: The command's parser.
    """
    parser.add_argument(
        "--activation-key",
        metavar="NAME",
        help="of the activations, e.g. kFp8DynamicTokenSym; none: 16-bit (default: what the checkpoint says)",
    )


def add_seed(parser: argparse.ArgumentParser, text: str) -> None:
    """Add ``--seed N``.

    Args:
        parser: The command's parser.
        text: Help text.
    """
    parser.add_argument("--seed", type=at_least(-(2**63), 2**64 - 1), default=0, metavar="N", help=text)


def add_scheme(parser: Any, text: str) -> None:
    """Add ``--scheme S``; completion lists entry points without loading them.

    Args:
        parser: The command's parser, or a group of it.
        text: Help text.
    """
    action = parser.add_argument("--scheme", metavar="S", help=text)
    action.completer = lambda **_: sorted(importlib.metadata.entry_points(group="moe_core.schemes").names)


def add_dtype(parser: Any) -> None:
    """Add ``--dtype``: a torch dtype by name.

    Args:
        parser: The command's parser, or a group of it.
    """
    names = (*DTYPES, *DTYPES.values())
    named = one_of(*names)

    def of_torch(text: str) -> str:
        name = named(text)
        return DTYPES.get(name, name)

    text = "of hidden states (default: bf16)"
    action = parser.add_argument("--dtype", type=of_torch, default="bf16", metavar="|".join(DTYPES), help=text)
    action.completer = lambda **_: names


def add_ranks(parser: argparse.ArgumentParser, title: str) -> None:
    """Add the options that spread a layer over ranks.

    They are ``--tp``, ``--ep``, ``--dp``, ``--all2all`` and ``--machine``.

    Args:
        parser: The command's parser.
        title: Title of the group in the help.
    """
    group = parser.add_argument_group(title)
    group.add_argument("--tp", type=whole, metavar="N", help="tensor-parallel ranks: columns are split (default: 1)")
    group.add_argument("--ep", type=whole, metavar="N", help="expert-parallel ranks: experts are spread")
    group.add_argument(
        "--dp", type=whole, metavar="N", help="different batches of tokens: 1, --ep, or all ranks (default: --ep)"
    )
    group.add_argument("--all2all", metavar="NAME", help="how tokens travel, e.g. alltoall (default: the fastest)")
    group.add_argument("--machine", metavar="NAME", help="figures of links: h200 …, or a JSON file (default: by GPU)")


def add_choice(parser: Any, name: str, default: str, names: Sequence[str], metavar: str, text: str) -> None:
    """Add an option with a fixed set of values.

    Args:
        parser: The command's parser, or a group of it.
        name: Name of the option.
        default: Default value.
        names: Accepted values.
        metavar: Name of the value in the help.
        text: Help text.
    """
    action = parser.add_argument(name, type=one_of(*names), default=default, metavar=metavar, help=text)
    action.completer = lambda **_: names
