"""Checkpoints written by quantization tools with reference outputs, and rewritten variants."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_core.testing.checkpoints import Tensors
from torch import Tensor

from moe_kit.changes import FILE, Change
from moe_kit.commands import Moe
from moe_kit.ensure import ensure

if TYPE_CHECKING:
    import pytest


def relative(found: Tensor, reference: Tensor) -> float:
    """Return the norm of the error relative to the reference.

    Args:
        found: The result.
        reference: The reference.

    Returns:
        The relative error.
    """
    return float((found.double() - reference.double()).norm() / reference.double().norm())


def routed(tensors: Tensors, given: str = "topk") -> Tensors:
    """Select a case's hidden states and routing.

    Args:
        tensors: Tensors of the case.
        given: "topk" for top-k tensors, "logits" for router logits.

    Returns:
        Input tensors of ``moe run``.
    """
    routing = {"topk": ("topk_ids", "topk_weights"), "logits": ("router_logits",)}[given]
    return {name: tensors[name] for name in ("hidden_states", *routing)}


def run(folder: Path, inputs: Tensors, scratch: Path, dtype: str = "fp32") -> Tensor:
    """Return the output of ``moe run``.

    Args:
        folder: The checkpoint folder.
        inputs: Input tensors.
        scratch: Folder for the files.
        dtype: Value of ``--dtype``.

    Returns:
        The output ``[M, K]``.
    """
    from moe_core.cli.main import main
    from safetensors.torch import load_file, save_file

    save_file(inputs, scratch / "in.safetensors")
    files = ["--input", str(scratch / "in.safetensors"), "--output", str(scratch / "out.safetensors")]
    code = main(["run", str(folder), "--dtype", dtype, *files])
    if code:
        raise AssertionError(f"moe run {folder} ends with {code}")
    return load_file(scratch / "out.safetensors")["output"]


def run_refuses(folder: Path, capsys: pytest.CaptureFixture[str], *parts: str, arguments: tuple[str, ...] = ()) -> None:
    """Check that ``moe run`` refuses a folder and writes nothing.

    Args:
        folder: The checkpoint folder.
        capsys: pytest's capture fixture.
        *parts: Texts that stderr must contain.
        arguments: Further arguments.
    """
    before = sorted(folder.parent.rglob("*"))
    Moe(capsys).refuses("run", folder, "--output", folder.parent / "out.safetensors", *arguments, parts=parts)
    ensure(sorted(folder.parent.rglob("*")) == before, "files were written")


class Cases:
    """Test cases below a folder.

    Each is a folder with config.json, model.safetensors, io.safetensors and manifest.json.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names = sorted(folder.name for folder in path.iterdir() if folder.is_dir())

    def bound(self, case: str, name: str) -> float:
        """Return a tolerance that the case's manifest states.

        Args:
            case: Name of the case.
            name: Name of the tolerance.

        Returns:
            The tolerance.
        """
        return float(json.loads((self.path / case / "manifest.json").read_text())["tolerances"][name])

    def bound_of_weights(self, case: str, dtype: str) -> float:
        """Return the tolerance of an output with 16-bit activations.

        Args:
            case: Name of the case.
            dtype: Dtype of the computation, as for ``--dtype``.

        Returns:
            The tolerance.
        """
        return self.bound(case, "ref_experts_out_f32" if dtype == "fp32" else "ref_experts_out_bf16_kernel")

    def tensors(self, case: str) -> Tensors:
        """Return the inputs and outputs of a case.

        Args:
            case: Name of the case.

        Returns:
            Tensors by name.
        """
        from safetensors.torch import load_file

        return load_file(self.path / case / "io.safetensors")

    def rewritten(
        self,
        case: str,
        folder: Path,
        quantization: dict[str, Any] | None = None,
        change: Callable[[Tensors], Tensors] = dict,
    ) -> Path:
        """Copy a case with another quantization_config or other tensors; the router stays.

        Args:
            case: Name of the case.
            folder: New folder.
            quantization: New quantization_config; None keeps it.
            change: Returns the new tensors.

        Returns:
            ``folder``.
        """
        from safetensors.torch import load_file, save_file

        config = json.loads((self.path / case / "config.json").read_text())
        if quantization is not None:
            config["quantization_config"] = quantization
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        tensors = change(load_file(self.path / case / "model.safetensors"))
        save_file({n: t.contiguous().clone() for n, t in tensors.items()}, folder / "model.safetensors")
        return folder

    def changed(self, case: str, folder: Path, change: Change) -> Path:
        """Copy a case and modify the copy.

        Args:
            case: Name of the case.
            folder: New folder.
            change: Modification of the folder.

        Returns:
            ``folder``.
        """
        folder.mkdir()
        for file in ("config.json", FILE):
            (folder / file).write_bytes((self.path / case / file).read_bytes())
        change(folder)
        return folder
