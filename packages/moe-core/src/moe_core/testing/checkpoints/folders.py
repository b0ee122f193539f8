"""Checkpoint folders: config.json with one safetensors file, or with shards and their index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    shards: int = 0,
    **changes: Any,
) -> Path:
    """Write a checkpoint folder.

    Args:
        folder: The folder, which is created if needed.
        tensors: Tensors by name.
        config: Content of config.json.
        shards: Number of shards, with an index; 0 for a single file.
        **changes: Entries of the config to replace; None removes one.

    Returns:
        ``folder``.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    content = {key: value for key, value in {**config, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    if not shards:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard::shards]
        save_file({name: tensors[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: Mapping[str, Any]) -> None:
    """Write the index of a folder's shards.

    Args:
        folder: The checkpoint folder.
        weight_map: File name by tensor name.
    """
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(weight_map)}))


def raw_file(header: object, data: bytes = b"") -> bytes:
    """Return the bytes of a safetensors file with any header.

    Args:
        header: Bytes, written unchanged, or an object that is written as JSON.
        data: Bytes after the header.

    Returns:
        The content of the file.
    """
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data
