"""Fuzz tests of the folders that a package's formats read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from moe_core.testing.checkpoints import write
from torch import Tensor

from moe_kit.fuzz.columns import check_columns
from moe_kit.fuzz.fuzzer import Fuzzer, Sample
from moe_kit.fuzz.reading import Layer, read_folder

#: an in-memory file system, if there is one
MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Folder:
    """A folder before its modification.

    Attributes:
        tensors: Makes the tensors on demand.
        config: Entries of config.json.
        shards: Number of shards, with an index; 0 for a single file.
    """

    tensors: Callable[[], Mapping[str, Tensor]]
    config: Mapping[str, Any]
    shards: int = 0


class FuzzTests:
    """Base of a test class: set ``folders``, one per way in which a format reads checkpoints.

    ``pytest --moe-fuzz N --moe-fuzz-start SEED`` sets the number of mutations of each folder and the first seed.
    """

    folders: ClassVar[Mapping[str, Folder]]
    #: whether the formats can read a subset of the columns; False for those that only read whole layers
    reads_columns: ClassVar[bool] = True

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrize tests by folder (pytest hook).

        Args:
            metafunc: pytest's object.
        """
        if "folder_name" in metafunc.fixturenames:
            metafunc.parametrize("folder_name", list(self.folders))

    def test_mutated_folders(self, folder_name: str, moe_fuzz: range) -> None:
        """Check that each mutation raises MoEError or loads as the folder states."""
        fuzz(folder_name, self.folders[folder_name], moe_fuzz)

    def test_columns_are_read_by_themselves(self, folder_name: str, tmp_path: Path) -> None:
        """Check that a rank's columns of the intermediate size equal those of the whole layer."""
        folder = self.folders[folder_name]
        if not self.reads_columns:
            import pytest

            pytest.skip("the formats read layers whole")
        check_columns(write(tmp_path, folder.tensors(), folder.config, shards=folder.shards))


def fuzz(name: str, folder: Folder, seeds: Iterable[int], *, read: Callable[[Path], Layer] = read_folder) -> None:
    """Check mutations of a folder, reduced to its first two experts.

    Args:
        name: Name for reports.
        folder: The folder.
        seeds: Seeds of the mutations.
        read: Returns a folder's layer, or raises MoEError to refuse it.

    Raises:
        AssertionError: A mutation is handled incorrectly; the message has the first failure of each kind.
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
    """Keep the first two experts, since more find no other failures and take longer."""
    found = {}
    for name, tensor in tensors.items():
        # An expert's number is the first part, or the second after its projection.
        parts = name.partition(".experts.")[2].split(".")[:2]
        expert = next(filter(str.isdecimal, parts), None)
        if expert is None:
            found[name] = tensor[:2].clone() if tensor.shape[:1] == (experts,) else tensor.clone()
        elif int(expert) < 2:
            found[name] = tensor.clone()
    return found
