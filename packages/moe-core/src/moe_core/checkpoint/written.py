"""Write checkpoint folders: config.json with one tensor file, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_core._support.atomic_write import write_whole

if TYPE_CHECKING:
    from torch import Tensor


def write_folder(folder: Path, config: Mapping[str, Any], files: Iterable[tuple[str, Mapping[str, Tensor]]]) -> None:
    """Write config.json and tensor files, each atomically, with an index if there are several.

    Args:
        folder: Existing folder to write to.
        config: Content of config.json.
        files: Name and tensors of each file; consumed one at a time.

    Raises:
        ConfigError: A file cannot be written, or its path exists and is not a regular file.
    """
    from safetensors.torch import save

    weight_map: dict[str, str] = {}
    size = 0
    for file, tensors in files:
        write_whole(folder / file, save(dict(tensors), metadata={"format": "pt"}))
        weight_map |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    if len(set(weight_map.values())) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_whole(folder / "model.safetensors.index.json", (json.dumps(index, indent=2) + "\n").encode())
    write_whole(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
