"""Find the files that make up a checkpoint folder and refuse unsupported ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_core._support.downloads import hub_hint, incomplete_hint, snapshot_hint
from moe_core.checkpoint.files.unsupported import unsupported_files
from moe_core.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

#: Suffixes of formats that run code when loaded.
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
PICKLE_HINT = (
    "pickled files run code when they are loaded and are never read: "
    "convert them with transformers' save_pretrained(..., safe_serialization=True)"
)

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{1,6})-of-(?P<count>[0-9]{1,6})\.safetensors")


def check_folder(path: Path) -> None:
    """Check that a path is a folder with a config.json.

    Args:
        path: The checkpoint folder.

    Raises:
        CheckpointError: It is not; the message states what the path is instead.
    """
    if path.is_file():
        kind = " (and pickled files are never read)" if path.suffix in PICKLE_SUFFIXES else ""
        foreign = unsupported_files([path])
        raise CheckpointError(
            f"{path}: {foreign}"
            if foreign is not None
            else f"{path} is a file; a checkpoint is the folder that holds config.json{kind}"
        )
    if not path.is_dir():
        what = "is no folder" if path.exists() else "does not exist"
        expected = hub_hint(path) or "expected a folder with config.json and *.safetensors"
        raise CheckpointError(f"{path} {what}; {expected}")
    if not (path / "config.json").exists():
        raise _nothing_in(path, "config.json", snapshot_hint(path))


def _nothing_in(folder: Path, missing: str, hint: str = "") -> CheckpointError:
    """Return the error for a folder without ``missing``, with the folder's content."""
    foreign = unsupported_files(folder.iterdir())
    if foreign is not None:
        return CheckpointError(f"{folder}: {foreign}")
    hint = hint or incomplete_hint(folder)
    return CheckpointError(f"{folder} is no checkpoint: it has no {missing} (it holds {_listing(folder)}){hint}")


def index_file(path: Path) -> Path | None:
    """Find the index of a folder.

    Args:
        path: The checkpoint folder.

    Returns:
        The index file, or None if there is none.

    Raises:
        CheckpointError: The folder has several indices and none of the usual name.
    """
    usual = path / INDEX_NAME
    if usual.exists():
        return usual
    others = sorted(path.glob("*.safetensors.index.json"))
    if len(others) > 1:
        raise CheckpointError(f"{path} has several indices, expected one: {', '.join(p.name for p in others)}")
    return others[0] if others else None


def shard_path(folder: Path, index: Path, tensor: str, entry: object) -> Path:
    """Return the file that an index entry names.

    Args:
        folder: The checkpoint folder.
        index: The index file, for messages.
        tensor: Name of the tensor.
        entry: Value of its index entry.

    Returns:
        The path of the shard.

    Raises:
        CheckpointError: The entry is not the plain name of a safetensors file.
    """
    if not isinstance(entry, str):
        raise CheckpointError(f"{index}: the entry of {tensor!r} is a {type(entry).__name__}, expected a file name")
    bare = not set(entry) & set("/\\\0") and entry not in ("", ".", "..") and not Path(entry).drive
    if not bare or len(entry) > 200:
        raise CheckpointError(
            f"{index}: the entry of {tensor!r} is {entry[:200]!r}, which may point outside the folder; "
            "expected a plain file name"
        )
    if Path(entry).suffix in PICKLE_SUFFIXES:
        raise CheckpointError(f"{index}: {tensor!r} is in {entry!r}; {PICKLE_HINT}")
    if not entry.endswith(".safetensors"):
        raise CheckpointError(f"{index}: the entry of {tensor!r} is {entry!r}, expected a .safetensors file")
    return folder / entry


def check_shards(folder: Path, index: Path, shards: Mapping[Path, str]) -> None:
    """Check that all shards exist.

    Args:
        folder: The checkpoint folder.
        index: The index file, for messages.
        shards: For each shard, the name of a tensor that the index assigns to it.

    Raises:
        CheckpointError: A shard is missing.
    """
    missing = sorted(path for path in shards if not path.exists())
    if not missing:
        return
    first = missing[0]
    more = f" ({len(missing)} of {len(shards)} shards are)" if len(shards) > 1 else ""
    hint = incomplete_hint(folder)
    if not hint and (folder / SINGLE_NAME).exists() and first.name != SINGLE_NAME:
        hint = f"; if {SINGLE_NAME} holds the whole model, remove the index"
    raise CheckpointError(
        f"{index} names the shard {first.name} (for {shards[first]!r}), which is missing in {folder}{more}{hint}"
    )


def unindexed_files(folder: Path) -> Sequence[Path]:
    """Find the safetensors files of a folder without an index.

    Args:
        folder: The checkpoint folder.

    Returns:
        model.safetensors if it exists, else ``model*.safetensors``, else all safetensors files.

    Raises:
        CheckpointError: There are none, or a numbered shard is missing.
    """
    single = folder / SINGLE_NAME
    if single.exists():
        return (single,)
    # Some tools add further safetensors files next to those of the model.
    found = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if found:
        _check_numbering(folder, found)
        return found
    pickled = pickled_files(folder)
    if pickled:
        raise CheckpointError(f"{folder} has {', '.join(pickled[:3])} but no safetensors; {PICKLE_HINT}")
    raise _nothing_in(folder, "*.safetensors")


def pickled_files(folder: Path) -> list[str]:
    """List the pickled files of a folder, which are never read.

    Args:
        folder: The checkpoint folder.

    Returns:
        Their names, sorted.
    """
    return sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)


def _check_numbering(folder: Path, found: Sequence[Path]) -> None:
    for path in found:
        match = _NUMBERED.fullmatch(path.name)
        if match is None:
            continue
        width, count = len(match["number"]), int(match["count"])
        present = {p.name for p in found}
        for number in range(1, min(count, 100_000) + 1):
            name = f"{match['stem']}-{number:0{width}d}-of-{match['count']}.safetensors"
            if name not in present:
                hint = incomplete_hint(folder)
                raise CheckpointError(f"{folder}: the shard {name} is missing ({path.name} is there){hint}")
        return


def _listing(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    if not names:
        return "nothing"
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
