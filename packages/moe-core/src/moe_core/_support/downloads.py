"""Hints for missing or incomplete downloads, with the command that fixes them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

#: Repository on the Hugging Face Hub: owner/name.
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)

#: File name patterns of unfinished downloads.
_UNFINISHED = ("*.incomplete", "*.part", "*.aria2", "*.crdownload")

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
#: A pointer contains only a version, a hash and a size.
LFS_POINTER_BYTES = 1024


def lfs_hint(path: Path) -> str:
    """Describe a file that is a Git LFS pointer.

    Args:
        path: The file.

    Returns:
        Text of an error message.
    """
    return f"{path} is a Git LFS pointer: download the files with: git lfs pull, in {path.parent}"


def hub_hint(path: Path) -> str:
    """Suggest a download if a missing path looks like the name of a model on the Hub.

    Args:
        path: The missing path.

    Returns:
        The hint, or an empty string.
    """
    name = path.as_posix()
    if not _HUB_ID.fullmatch(name) or name.startswith((".", "-")):
        return ""
    return (
        f"for the model of that name on the Hugging Face Hub, run hf download {name} --local-dir {path.name}, "
        f"and give the folder {path.name} (nothing is downloaded here)"
    )


def snapshot_hint(folder: Path) -> str:
    """Suggest a snapshot if ``folder`` is the Hub cache of a model, not one of its snapshots.

    Args:
        folder: The folder.

    Returns:
        Suffix of an error message, or an empty string.
    """
    snapshots = sorted(config.parent for config in folder.glob("snapshots/*/config.json"))
    return f"; it is a cache of the Hugging Face Hub: give one of its snapshots, {snapshots[-1]}" if snapshots else ""


def incomplete_hint(folder: Path) -> str:
    """Suggest resuming a download if unfinished files are found for ``folder``.

    Args:
        folder: The folder in which a file is missing.

    Returns:
        Suffix of an error message, or an empty string.
    """
    # Next to the files, in a local folder's download cache, and in the cache that a snapshot links to.
    places = (folder, folder / ".cache" / "huggingface" / "download", folder.parent.parent / "blobs")
    found = list(itertools.chain.from_iterable(place.glob(end) for place in places for end in _UNFINISHED))
    if not found:
        return ""
    count = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"; the download is not complete ({found[0].name}{count}): run it again to resume"
