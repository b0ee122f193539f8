"""Checkpoints that tools wrote, with the outputs that the tools give, and the same experts written otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_core.testing.checkpoints.changes import FILE, Change
from moe_core.testing.checkpoints.experts import Tensors
from moe_core.testing.ensure import ensure
from torch import Tensor

from moe_kit.commands import Moe

if TYPE_CHECKING:
    import pytest


def relative(found: Tensor, reference: Tensor) -> float:
    """The error's norm over the reference's."""
    return float((found.double() - reference.double()).norm() / reference.double().norm())


def routed(tensors: Tensors, given: str = "topk") -> Tensors:
    """Of a case's tensors: hidden states with their routing, ``given`` as "topk" pairs or router "logits"."""
    routing = {"topk": ("topk_ids", "topk_weights"), "logits": ("router_logits",)}[given]
    return {name: tensors[name] for name in ("hidden_states", *routing)}


def run(folder: Path, inputs: Tensors, scratch: Path, dtype: str = "fp32") -> Tensor:
    """The output of ``moe run`` on ``inputs``."""
    from moe_core.cli.main import main
    from safetensors.torch import load_file, save_file

    save_file(inputs, scratch / "in.safetensors")
    files = ["--input", str(scratch / "in.safetensors"), "--output", str(scratch / "out.safetensors")]
    code = main(["run", str(folder), "--dtype", dtype, *files])
    if code:
        raise AssertionError(f"moe run {folder} ends with {code}")
    return load_file(scratch / "out.safetensors")["output"]


def run_refuses(folder: Path, capsys: pytest.CaptureFixture[str], *parts: str, arguments: tuple[str, ...] = ()) -> None:
    """``moe run`` on ``folder`` ends with 2, nothing written, and one paragraph on stderr that has all ``parts``."""
    before = sorted(folder.parent.rglob("*"))
    Moe(capsys).refuses("run", folder, "--output", folder.parent / "out.safetensors", *arguments, parts=parts)
    ensure(sorted(folder.parent.rglob("*")) == before, "files were written")


class Cases:
    """The folders beneath ``path``: config.json, model.safetensors, io.safetensors, manifest.json."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names = sorted(folder.name for folder in path.iterdir() if folder.is_dir())

    def bound(self, case: str, name: str) -> float:
        """A tolerance that the case's manifest states."""
        return float(json.loads((self.path / case / "manifest.json").read_text())["tolerances"][name])

    def bound_of_weights(self, case: str, dtype: str) -> float:
        """That of an output with 16-bit activations, computed in ``dtype``."""
        return self.bound(case, "ref_experts_out_f32" if dtype == "fp32" else "ref_experts_out_bf16_kernel")

    def tensors(self, case: str) -> Tensors:
        """Inputs and outputs."""
        from safetensors.torch import load_file

        return load_file(self.path / case / "io.safetensors")

    def rewritten(
        self,
        case: str,
        folder: Path,
        quantization: dict[str, Any] | None = None,
        change: Callable[[Tensors], Tensors] = dict,
    ) -> Path:
        """A copy of ``case`` with another quantization_config and other tensors; the router stays."""
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
        """A copy of ``case`` with a change."""
        folder.mkdir()
        for file in ("config.json", FILE):
            (folder / file).write_bytes((self.path / case / file).read_bytes())
        change(folder)
        return folder
