"""Tests of ``moe`` on a scheme's own checkpoint: what it computes and what it refuses."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from moe_core.checkpoint import Checkpoint, LayerSource, read_layer
from moe_core.cli import _machine
from moe_core.cli.main import main
from moe_core.reference.tolerance import expected_output
from moe_core.selection.registry import registry
from moe_core.spec.device import DeviceInfo
from moe_core.spec.quant_key import key_name
from torch import Tensor

from moe_kit.ensure import ensure
from moe_kit.tool_outputs import run_refuses

INDEX = "model.safetensors.index.json"
TOKENS = 7


@dataclass(frozen=True)
class Original:
    """A scheme's quickstart checkpoint.

    Attributes:
        folder: The checkpoint folder.
        source: Its first layer.
        file: Name of the file with the experts' tensors.
        tensors: Tensors of that file by name.
    """

    folder: Path
    source: LayerSource
    file: str
    tensors: dict[str, Tensor]

    def layers(self) -> list[int]:
        """Return the indices of the layers with experts."""
        names = Checkpoint.open(self.folder).names
        return sorted({int(found[1]) for name in names if (found := re.search(r"\.(\d+)\..*\.experts\.", name))})

    def kinds(self) -> list[str]:
        """Return one tensor name per kind; names of a kind differ only in their numbers."""
        return list({re.sub(r"\d+", "#", name): name for name in sorted(self.tensors) if ".experts." in name}.values())


class CommandLineTests:
    """Base of a test class: set ``scheme``.

    :attr:`~moe_core.Scheme.quickstart` of the scheme writes the checkpoint.
    """

    scheme: ClassVar[str]

    @pytest.fixture(autouse=True)
    def no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make commands choose the CPU automatically."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    @pytest.fixture(scope="class")
    @classmethod
    def original(cls, tmp_path_factory: pytest.TempPathFactory) -> Original:
        """The original checkpoint, written once; tests that modify it use :meth:`folder`."""
        from safetensors.torch import load_file

        folder = tmp_path_factory.mktemp(cls.scheme)
        registry().scheme(cls.scheme).write_quickstart(folder)
        for file in sorted(folder.glob("*.safetensors")):
            tensors = load_file(file)
            if any(".experts." in name for name in tensors):
                return Original(folder, read_layer(Checkpoint.open(folder)), file.name, tensors)
        raise AssertionError(f"no file of the checkpoint holds experts: {sorted(map(str, folder.iterdir()))}")

    @pytest.fixture
    def folder(self, original: Original, tmp_path: Path) -> Path:
        """Separate checkpoint folder, whose files are links until a test replaces one."""
        copy = tmp_path / "checkpoint"
        copy.mkdir()
        for file in original.folder.iterdir():
            os.link(file, copy / file.name)
        return copy

    @pytest.fixture
    def refuses(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
        """Check that ``moe run`` exits with 2, one paragraph with all parts, and no output file."""

        def check(*parts: str, arguments: tuple[str, ...] = ()) -> None:
            run_refuses(folder, capsys, *parts, arguments=arguments)

        return check

    def test_quickstart(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Check the first command that people type."""
        code = main(["quickstart", "--scheme", self.scheme])
        out = capsys.readouterr().out
        ensure(code == 0 and "within the tolerance" in out and "on cpu: " in out, out)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_input_to_output(self, original: Original, tmp_path: Path, dtype: torch.dtype) -> None:
        """Check every dtype, with a different layer each if the checkpoint has several."""
        from safetensors.torch import load_file, save_file

        layers = original.layers()
        layer = layers[dtype.itemsize % len(layers)]
        source = read_layer(Checkpoint.open(original.folder), layer, dtype=dtype)
        config = source.config
        generator = torch.Generator().manual_seed(1)
        weights, ids = torch.rand(TOKENS, config.num_experts, generator=generator).topk(config.top_k, dim=1)
        x = torch.randn(TOKENS, config.hidden_size, generator=generator).to(dtype)
        save_file({"hidden_states": x, "topk_weights": weights, "topk_ids": ids}, tmp_path / "in.safetensors")
        files = ["--input", str(tmp_path / "in.safetensors"), "--output", str(tmp_path / "o.safetensors")]
        name = str(dtype).removeprefix("torch.")
        code = main(["run", str(original.folder), "--layer", str(layer), "--dtype", name, *files])
        ensure(code == 0, f"moe run ends with {code}")
        canonical = source.weights()
        canonical.validate(config, values=True)
        expected = expected_output(x, canonical, config, topk_weights=weights, topk_ids=ids, compute_dtype=dtype)
        expected.compare(load_file(tmp_path / "o.safetensors")["output"], "moe run")

    def test_explain_for_a_gpu_that_is_not_here(self, original: Original, capsys: pytest.CaptureFixture[str]) -> None:
        """Check a layer of a checkpoint and a layer described by its sizes."""
        key = key_name(original.source.weight_key)
        for layer in (
            [str(original.folder)],
            ["--scheme", self.scheme, "--shape", "64,4,2048,768", "--weight-key", key],
        ):
            code = main(["explain", *layer, "--device", "sm90", "--json"])
            printed = capsys.readouterr()
            ensure(code == 0, printed.err)
            data = json.loads(printed.out)
            ensure((data["scheme"], data["weight_key"]) == (self.scheme, key) and data["chosen"], data)

    def test_bench(
        self, original: Original, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Check that every number of tokens is timed."""
        monkeypatch.setattr(_machine, "measure_limits", lambda *_: _machine.Limits(1e10, 1e10, "float32"))
        code = main(["bench", str(original.folder), "--tokens", "1,3", "--budget", "0.01", "--json"])
        printed = capsys.readouterr()
        ensure(code == 0, printed.err)
        results = json.loads(printed.out)["results"]
        ensure({result["tokens"] for result in results} == {1, 3}, results)
        ensure(all(result["seconds"] > 0 for result in results), results)

    # ------------------------------------------------------------------ bad input

    def test_truncated_file(self, original: Original, folder: Path, refuses: Callable[..., None]) -> None:
        """Check truncation at several sizes."""
        file = folder / original.file
        content = file.read_bytes()
        file.unlink()
        for size in (0, 4, 1000, len(content) - 1):
            file.write_bytes(content[:size])
            refuses(f"{original.file} is truncated")

    def test_missing_tensors(self, original: Original, folder: Path, refuses: Callable[..., None]) -> None:
        """Check the loss of every kind of expert tensor."""
        for name in original.kinds():
            rewrite(folder, original, {name: None})
            refuses(f"{name} is missing")

    def test_shapes(self, original: Original, folder: Path, refuses: Callable[..., None]) -> None:
        """Check tensors of every kind without their last row."""
        for name in original.kinds():
            tensor = original.tensors[name]
            stacked = not re.search(r"\.experts\.\d", name)
            if tensor.dim() <= stacked:
                continue
            cut = tensor[:, :-1] if stacked else tensor[:-1]
            rewrite(folder, original, {name: cut})
            refuses(name, f"{cut.shape[stacked]}", "expected", f"{tensor.shape[stacked]}")

    def test_values_that_are_no_numbers(self, original: Original, folder: Path, refuses: Callable[..., None]) -> None:
        """Check NaN in every kind of tensor that can hold it."""
        for name in original.kinds():
            broken = original.tensors[name].clone()
            if broken.is_floating_point() and broken.dim():
                broken[(-1,) * broken.dim()] = float("nan")
                rewrite(folder, original, {name: broken})
                refuses(f"{name} has 1 ", "NaN", str([size - 1 for size in broken.shape]))

    def test_index_names_what_its_file_has_not(
        self, original: Original, folder: Path, refuses: Callable[..., None]
    ) -> None:
        """Check an index that names a tensor its file lacks."""
        name = original.kinds()[0]
        index = folder / INDEX
        weight_map = dict.fromkeys(Checkpoint.open(folder).names, original.file)
        if index.exists():
            weight_map = json.loads(index.read_text())["weight_map"]
            index.unlink()
        index.write_text(json.dumps({"weight_map": weight_map}))
        rewrite(folder, original, {name: None}, index=False)
        refuses(f"says that {original.file} holds '{name}', but it does not")

    def test_a_backend_that_cannot_run_here(self, original: Original, refuses: Callable[..., None]) -> None:
        """Check that the backend is refused with a reason and never replaced."""
        cpu = DeviceInfo.parse("cpu")
        for backend in registry().oracle(self.scheme).table():
            classes = backend.load()
            if all(part.reason_against(cpu) for experts in classes for part in experts.claims.devices):
                refuses(
                    f"'{backend.name}' does not fit, and is never replaced",
                    "device is cpu",
                    arguments=("--backend", backend.name, "--device", "cpu"),
                )
                return
        pytest.skip("every backend of the scheme runs on the CPU")


def rewrite(folder: Path, original: Original, changes: dict[str, Tensor | None], *, index: bool = True) -> None:
    """Rewrite the file of a checkpoint with changed tensors.

    Args:
        folder: Copy of the checkpoint.
        original: The original checkpoint.
        changes: New tensors by name; None removes a tensor.
        index: Whether to remove it from the index too.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor | None] = {**original.tensors, **changes}
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    (folder / original.file).unlink()
    save_file(kept, folder / original.file)
    if index and (original.folder / INDEX).exists():
        whole = json.loads((original.folder / INDEX).read_text())
        whole["weight_map"] = {n: file for n, file in whole["weight_map"].items() if file != original.file or n in kept}
        (folder / INDEX).unlink()
        (folder / INDEX).write_text(json.dumps(whole))
