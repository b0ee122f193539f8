"""Checks of arguments that need no torch: they refuse arguments before it is imported."""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_core.cli import hub
from moe_core.errors import ConfigError


def check_least(args: argparse.Namespace, **least: int) -> None:
    """Refuse options below their minimum.

    Args:
        args: Parsed arguments; an option that is None was not given.
        **least: Smallest value of each option, by its name.

    Raises:
        ConfigError: An option is below its minimum.
    """
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and value < smallest:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected {smallest} or more")


def check_folder(args: argparse.Namespace) -> None:
    """Find the checkpoint folder ``args.path``, which may name a model on the Hugging Face Hub.

    A name that is not a path is replaced by the folder in the Hub's local cache. Nothing is downloaded.

    Args:
        args: Parsed arguments; ``path`` None was not given.

    Raises:
        ConfigError: There is neither such a folder nor a cached model of that name.
    """
    path = args.path
    if path is None or _may_exist(path):
        # The checkpoint reader reports a folder or file that is not a checkpoint.
        return
    name = path.as_posix()
    if not hub.is_name(name):
        raise ConfigError(
            f"{path} does not exist; expected a folder with config.json and *.safetensors, or the name of a model in "
            "the Hugging Face cache (owner/name)"
        )
    found = hub.snapshot(name)
    if found is None:
        raise ConfigError(
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
        ConfigError: The file does not exist.
    """
    path = getattr(args, option)
    if path is not None and not _may_exist(path):
        raise ConfigError(f"--{option} {path} can't be read: No such file or directory")


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
        ConfigError: The options contradict each other.
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
            raise ConfigError(f"--{given} needs a checkpoint folder")
        return
    if args.shape is not None or args.scheme is not None:
        raise ConfigError("a checkpoint folder cannot be combined with --scheme and --shape")
    if args.weight_key is not None or args.bias:
        raise ConfigError(
            f"{'--bias' if args.weight_key is None else '--weight-key'} describes a layer of --scheme and --shape; "
            "a checkpoint folder states it"
        )
