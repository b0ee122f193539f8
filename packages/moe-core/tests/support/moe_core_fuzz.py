"""Mutations of a checkpoint that tests write."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from moe_core.testing.fuzz import Fuzzer, Sample
from moe_core.testing.fuzz.reading import Layer, read_folder
from moe_core_checkpoints import write
from torch import Tensor

#: a file system in memory, where there is one
MEMORY = Path("/dev/shm")


def fuzz(
    name: str,
    seeds: Iterable[int],
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    shards: int = 0,
    read: Callable[[Path], Layer] = read_folder,
) -> None:
    """Every seed's mutation of a folder with the first two experts is refused, or right."""
    top = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    try:
        folder = write(
            top / "sample", _first_two(tensors, config["num_experts"]), {**config, "num_experts": 2}, shards=shards
        )
        report = Fuzzer(Sample.of(name, folder), top / "mutated", read).run(seeds)
    finally:
        shutil.rmtree(top)
    print(f"{name}: {report}")
    assert not report.failures, "\n".join(map(str, report.failures))


def _first_two(tensors: Mapping[str, Tensor], experts: int) -> dict[str, Tensor]:
    """More of them find nothing else, and take longer."""
    found = {}
    for name, tensor in tensors.items():
        expert = name.partition(".experts.")[2].partition(".")[0]
        if not expert.isdecimal():
            found[name] = tensor[:2].clone() if tensor.shape[:1] == (experts,) else tensor.clone()
        elif int(expert) < 2:
            found[name] = tensor.clone()
    return found
