"""Checks of arguments that need no torch: they refuse arguments before it is imported."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from moe_core.cli import hub

MOST_TOKENS = 2**40
LARGEST_SIZE = 2**24


class RefusedError(ValueError):
    """A refused argument: what is wrong, the value found and what is expected."""


def check_tokens(count: int, *, least: int = 1) -> None:
    """Refuse a number of tokens that is out of range.

    Args:
        count: Value of ``--tokens``.
        least: Smallest number that the command accepts.

    Raises:
        RefusedError: ``count`` is out of range.
    """
    if count < least:
        raise RefusedError(f"--tokens {count}: expected {least} or more")
    if count > MOST_TOKENS:
        raise RefusedError(f"--tokens {count}: expected {MOST_TOKENS} or fewer")


def token_counts(text: str) -> list[int]:
    """Parse ``--tokens M,M,…``.

    Args:
        text: Distinct positive integers, separated by commas.

    Returns:
        The integers, in the given order.

    Raises:
        RefusedError: ``text`` is anything else.
    """
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise RefusedError(f"--tokens {text!r}: expected positive integers, e.g. 1,8,32")
    twice = next((count for place, count in enumerate(counts) if count in counts[:place]), None)
    if twice is not None:
        raise RefusedError(f"--tokens {text!r} has {twice} twice, expected each number of tokens once")
    check_tokens(max(counts))
    return counts


def names_of(device: str | None) -> list[str]:
    """Parse ``--device A,B``.

    Args:
        device: Names separated by commas; None for this machine's device.

    Returns:
        The names; empty for this machine's device.

    Raises:
        RefusedError: A name is empty or repeated.
    """
    if device is None:
        return []
    names = [name.strip() for name in device.split(",")]
    for place, name in enumerate(names):
        if not name and len(names) > 1:
            raise RefusedError(
                f"--device {device!r} has an empty name, expected names with commas between, e.g. a100,h100"
            )
        if name in names[:place]:
            raise RefusedError(f"--device {device!r} has {name} twice, expected each device once")
    return names


def shape_of(text: str) -> tuple[int, int, int, int]:
    """Parse ``--shape E,k,K,N``.

    Args:
        text: Experts, experts per token, hidden size and intermediate size.

    Returns:
        The four integers.

    Raises:
        RefusedError: ``text`` is anything else, or a size is too large.
    """
    try:
        experts, top_k, hidden, inter = (int(part) for part in text.split(","))
    except ValueError:
        raise RefusedError(f"--shape {text}: expected four integers E,k,K,N, e.g. 128,8,2048,768") from None
    if max(experts, top_k, hidden, inter) > LARGEST_SIZE:
        raise RefusedError(f"--shape {text}: expected sizes of {LARGEST_SIZE} or less")
    return experts, top_k, hidden, inter


def check_positive(args: argparse.Namespace, **units: str) -> None:
    """Refuse options that are not positive, finite numbers.

    Args:
        args: Parsed arguments; an option that is None was not given.
        **units: Unit of each option, by its name.

    Raises:
        RefusedError: An option is zero, negative, infinite or NaN.
    """
    for option, unit in units.items():
        value = getattr(args, option)
        if value is not None and not 0 < value < math.inf:
            raise RefusedError(f"--{option} {value}: expected a positive number of {unit}")


def check_least(args: argparse.Namespace, **least: int) -> None:
    """Refuse options below their minimum.

    Args:
        args: Parsed arguments; an option that is None was not given.
        **least: Smallest value of each option, by its name.

    Raises:
        RefusedError: An option is below its minimum.
    """
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and value < smallest:
            raise RefusedError(f"--{name.replace('_', '-')} {value}: expected {smallest} or more")


def check_folder(args: argparse.Namespace) -> None:
    """Find the checkpoint folder ``args.path``, which may name a model on the Hugging Face Hub.

    A name that is not a path is replaced by the folder in the Hub's local cache. Nothing is downloaded.

    Args:
        args: Parsed arguments; ``path`` None was not given.

    Raises:
        RefusedError: There is neither such a folder nor a cached model of that name.
    """
    path = args.path
    if path is None or _may_exist(path):
        # The checkpoint reader reports a folder or file that is not a checkpoint.
        return
    name = path.as_posix()
    if not hub.is_name(name):
        raise RefusedError(
            f"{path} does not exist; expected a folder with config.json and *.safetensors, or the name of a model in "
            "the Hugging Face cache (owner/name)"
        )
    found = hub.snapshot(name)
    if found is None:
        raise RefusedError(
            f"{path} does not exist; the Hugging Face cache {hub.cache()} has no model of that name either: for the "
            f"model on the Hub, run hf download {name} (config.json is enough for moe explain: "
            f"hf download {name} config.json)"
        )
    args.path = found


def check_file(args: argparse.Namespace, option: str) -> None:
    """Refuse an input file that does not exist.

    Args:
        args: Parsed arguments; an option that is None was not given.
        option: Name of the option, without dashes.

    Raises:
        RefusedError: There is no such file.
    """
    path = getattr(args, option)
    if path is not None and not _may_exist(path):
        raise RefusedError(f"--{option} {path} can't be read: No such file or directory")


def _may_exist(path: Path) -> bool:
    """Whether a path exists, or the system cannot tell; then the reader reports the reason."""
    try:
        return path.exists()
    except OSError:  # A name may be too long, or a folder may not be searchable.
        return True


def check_origin(args: argparse.Namespace) -> None:
    """Refuse options that need a checkpoint folder without one, and a described layer with one.

    Args:
        args: Parsed arguments.

    Raises:
        RefusedError: The options contradict each other.
    """
    if args.path is None:
        about = {
            "layer": args.layer,
            "stack": args.stack,
            "routing": args.routing,
            "assume": args.assume or None,
            "top-k": args.top_k,
        }
        given = next((option for option, value in about.items() if value is not None), None)
        if given is not None:
            raise RefusedError(f"--{given} is for a checkpoint folder, and none is given")
        if args.shape is not None:
            shape_of(args.shape)
        return
    if args.shape is not None or args.scheme is not None:
        raise RefusedError("the layer is one of a checkpoint folder, or described by --scheme and --shape, not both")
    if args.weight_key is not None or args.bias:
        raise RefusedError(
            f"{'--bias' if args.weight_key is None else '--weight-key'} describes a layer of --scheme and --shape; "
            "a checkpoint folder states it"
        )
