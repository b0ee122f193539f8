"""Mutations of the folders that a package's formats read, as tests of that package."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from moe_core.testing.checkpoints.folders import write
from torch import Tensor

from moe_kit.fuzz.columns import check_columns
from moe_kit.fuzz.fuzzer import Fuzzer, Sample
from moe_kit.fuzz.reading import Layer, read_folder

#: a file system in memory, where there is one
MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Folder:
    """What is written before it is changed: ``tensors``, made when they are needed, and config.json's entries.

    ``shards``: files of tensors with an index; 0 for one file without.
    """

    tensors: Callable[[], Mapping[str, Tensor]]
    config: Mapping[str, Any]
    shards: int = 0


class FuzzTests:
    """Base of a test class: set ``folders``, one for everything that a format reads in another way.

    ``pytest --moe-fuzz N --moe-fuzz-start SEED`` says how many mutations of each are made, and the first seed.
    """

    folders: ClassVar[Mapping[str, Folder]]
    #: whether the formats read a part of the columns by itself; False for those that read layers whole
    reads_columns: ClassVar[bool] = True

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """pytest's hook: one test per folder."""
        if "folder_name" in metafunc.fixturenames:
            metafunc.parametrize("folder_name", list(self.folders))

    def test_mutated_folders(self, folder_name: str, moe_fuzz: range) -> None:
        """A MoEError, or the layer that the folder says, never anything else."""
        fuzz(folder_name, self.folders[folder_name], moe_fuzz)

    def test_columns_are_read_by_themselves(self, folder_name: str, tmp_path: Path) -> None:
        """A part of the intermediate size that a rank may read is that part of the whole layer."""
        folder = self.folders[folder_name]
        if not self.reads_columns:
            import pytest

            pytest.skip("the formats read layers whole")
        check_columns(write(tmp_path, folder.tensors(), folder.config, shards=folder.shards))


def fuzz(name: str, folder: Folder, seeds: Iterable[int], *, read: Callable[[Path], Layer] = read_folder) -> None:
    """Every seed's mutation of a folder with the first two experts is refused, or right.

    Raises AssertionError with the first failure of each kind.
    """
    top = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    tensors = _first_two(folder.tensors(), folder.config["num_experts"])
    try:
        sample = write(top / "sample", tensors, {**folder.config, "num_experts": 2}, shards=folder.shards)
        report = Fuzzer(Sample.of(name, sample), top / "mutated", read).run(seeds)
    finally:
        shutil.rmtree(top)
    print(f"{name}: {report}")
    if report.failures:
        raise AssertionError("\n".join(map(str, report.failures)))


def _first_two(tensors: Mapping[str, Tensor], experts: int) -> dict[str, Tensor]:
    """More of them find nothing else, and take longer."""
    found = {}
    for name, tensor in tensors.items():
        # an expert's number is the first part or, behind its projection, the second
        parts = name.partition(".experts.")[2].split(".")[:2]
        expert = next(filter(str.isdecimal, parts), None)
        if expert is None:
            found[name] = tensor[:2].clone() if tensor.shape[:1] == (experts,) else tensor.clone()
        elif int(expert) < 2:
            found[name] = tensor.clone()
    return found
