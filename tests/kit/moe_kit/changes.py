"""Modifications of a checkpoint folder with one safetensors file, each a function of the folder, and broken files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

Change = Callable[[Path], None]
FILE = "model.safetensors"


def with_config(**entries: Any) -> Change:
    """Replace entries of config.json.

    Args:
        **entries: New values of the entries.

    Returns:
        A function of the folder.
    """

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **entries}))

    return change


def with_quantization(**entries: Any) -> Change:
    """Replace entries of ``quantization_config`` in config.json.

    Args:
        **entries: New values of the entries.

    Returns:
        A function of the folder.
    """

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        with_config(quantization_config={**config["quantization_config"], **entries})(folder)

    return change


def with_tensors(make: Callable[[str, Tensor], Tensor | None]) -> Change:
    """Replace or remove tensors.

    Args:
        make: Returns the new tensor for a name and tensor; None removes it.

    Returns:
        A function of the folder.
    """

    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        made = {name: make(name, tensor) for name, tensor in load_file(folder / FILE).items()}
        save_file({name: tensor.contiguous() for name, tensor in made.items() if tensor is not None}, folder / FILE)

    return change


def with_tensor(name: str, make: Callable[[Tensor], Tensor | None]) -> Change:
    """Replace or remove one tensor.

    Args:
        name: Name of the tensor, which must exist.
        make: Returns the new tensor; None removes it.

    Returns:
        A function of the folder; it raises AssertionError if the tensor does not exist.
    """

    def change(folder: Path) -> None:
        found = []

        def one(other: str, tensor: Tensor) -> Tensor | None:
            if other != name:
                return tensor
            found.append(other)
            return make(tensor.clone())

        with_tensors(one)(folder)
        if not found:
            raise AssertionError(f"{folder / FILE} has no tensor {name}")

    return change


def truncated(folder: Path) -> None:
    """Remove the last byte of the safetensors file.

    Args:
        folder: The checkpoint folder.
    """
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-1])


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
