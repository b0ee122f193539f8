"""Folders and files that are not, or not wholly, what somebody meant to download, and the command that helps."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

#: a repository on the Hugging Face Hub: owner/name
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)

#: how programs end the names of files that they have not finished
_UNFINISHED = ("*.incomplete", "*.part", "*.aria2", "*.crdownload")

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
#: a pointer has a version, a hash and a size
LFS_POINTER_BYTES = 1024


def lfs_hint(path: Path) -> str:
    """What to say of a file that is a Git LFS pointer."""
    return (
        f"{path} is a Git LFS pointer, a text that stands for the file: "
        f"get the files themselves with: git lfs pull, in {path.parent}"
    )


def hub_hint(path: Path) -> str:
    """What to do where ``path`` is not there and reads like the name of a model on the Hugging Face Hub, or nothing."""
    name = path.as_posix()
    if not _HUB_ID.fullmatch(name) or name.startswith((".", "-")):
        return ""
    return (
        f"for the model of that name on the Hugging Face Hub, run hf download {name} --local-dir {path.name}, "
        f"and give the folder {path.name} (nothing is downloaded here)"
    )


def snapshot_hint(folder: Path) -> str:
    """What to add where ``folder`` is a model in the Hub's cache and not one of its snapshots."""
    snapshots = sorted(config.parent for config in folder.glob("snapshots/*/config.json"))
    return f"; it is a cache of the Hugging Face Hub: give one of its snapshots, {snapshots[-1]}" if snapshots else ""


def incomplete_hint(folder: Path) -> str:
    """What to add where something is missing in ``folder`` and a download has left unfinished files."""
    # beside the files, in a local folder's own cache, and in the cache that a snapshot's links point to
    places = (folder, folder / ".cache" / "huggingface" / "download", folder.parent.parent / "blobs")
    found = list(itertools.chain.from_iterable(place.glob(end) for place in places for end in _UNFINISHED))
    if not found:
        return ""
    count = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"; the download is not complete ({found[0].name}{count}): run it again, it goes on where it stopped"
