"""``moe`` on a GPTQ checkpoint: quickstart, explain, run and bench, and bad input in whole folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.cli import main
from moe_core.testing.tolerance import expected_output
from moe_wna16.quickstart import CONFIG, EXPERTS, GROUP, HIDDEN, TOP_K, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "model.layers.0.mlp.experts"
FILE = "model.safetensors"


pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    write_checkpoint(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Iterator[Path]:
    """A checkpoint of its own; files are links until a test replaces one."""
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    for file in original.iterdir():
        os.link(file, copy / file.name)
    yield copy
    assert not (tmp_path / "out.safetensors").exists()


def refuses(capsys: pytest.CaptureFixture[str], folder: Path, *parts: str, arguments: tuple[str, ...] = ()) -> None:
    """``moe run`` ends with 2, one paragraph with all ``parts``, and nothing written."""
    capsys.readouterr()
    code = main(["run", str(folder), "--output", str(folder.parent / "out.safetensors"), *arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("moe run: ")
    assert "Traceback" not in err
    for part in parts:
        assert part in err


def rewrite(folder: Path, changes: dict[str, Tensor | None]) -> None:
    tensors: dict[str, Tensor | None] = {**load_file(folder / FILE), **changes}
    (folder / FILE).unlink()
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / FILE)


def reconfigure(folder: Path, **changes: Any) -> None:
    config = {**CONFIG, "quantization_config": {**CONFIG["quantization_config"], **changes}}  # type: ignore[dict-item]
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))


def test_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "--scheme", "wna16"]) == 0
    out = capsys.readouterr().out
    assert "within the tolerance" in out
    assert "on cpu: torch" in out


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_input_to_output(original: Path, tmp_path: Path, dtype: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weights, ids = torch.rand(7, EXPERTS, generator=generator).topk(TOP_K, dim=1)
    stored = torch.randn(7, HIDDEN, generator=generator).to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    save_file({"hidden_states": stored, "topk_weights": weights, "topk_ids": ids}, tmp_path / "in.safetensors")
    files = ["--input", str(tmp_path / "in.safetensors"), "--output", str(tmp_path / "o.safetensors")]
    assert main(["run", str(original), "--dtype", dtype, *files]) == 0
    source = read_layer(Checkpoint.open(original), dtype=stored.dtype)
    expected = expected_output(stored, source.weights(), source.config, topk_weights=weights, topk_ids=ids)
    expected.compare(load_file(tmp_path / "o.safetensors")["output"], "moe run")


def test_explain_for_a_gpu_that_is_not_here(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(original), "--device", "sm90", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["scheme"] == "wna16"
    assert data["chosen"]
    key = "kInt4StaticAsym"
    layer = ["--scheme", "wna16", "--shape", "128,8,2048,768", "--weight-key", key]
    assert main(["explain", *layer, "--device", "sm90", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weight_key"] == key


def test_looking_imports_no_kernels() -> None:
    program = (
        "import sys, moe_core.cli as cli\n"
        "for arguments in (['backends'], ['doctor']):\n"
        "    cli.main(arguments)\n"
        "print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


# ------------------------------------------------------------------ bad input


def test_truncated_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = (folder / FILE).read_bytes()
    (folder / FILE).unlink()
    for size in (0, 4, 1000, len(content) - 1):
        (folder / FILE).write_bytes(content[:size])
        refuses(capsys, folder, f"{FILE} is truncated")


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7])
def test_other_bits(folder: Path, capsys: pytest.CaptureFixture[str], bits: int) -> None:
    reconfigure(folder, bits=bits)
    refuses(capsys, folder, "quant_method 'gptq'", PREFIX, f"GPTQ (wna16): bits is {bits}, expected 4 or 8")


def test_groups_that_no_backend_reads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, Tensor | None] = {}
    for name, tensor in load_file(folder / FILE).items():
        if ".experts." in name and name.endswith(("qzeros", "scales")):
            changes[name] = tensor[::2].contiguous()
        elif name.endswith("g_idx"):
            changes[name] = tensor // 2
    rewrite(folder, changes)
    reconfigure(folder, group_size=2 * GROUP)
    refuses(capsys, folder, "no backend fits", "does not read weights quantised as", "1x256")
    refuses(capsys, folder, "no torch", "no marlin", arguments=("-v",))


def test_order_out_of_range(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{PREFIX}.5.down_proj.g_idx"
    g_idx = load_file(folder / FILE)[name]
    g_idx[7] = 2
    rewrite(folder, {name: g_idx})
    refuses(capsys, folder, f"{name} is 2 at [7], expected 0 to 1: {PREFIX}.5.down_proj.scales has 2 groups")


def test_an_empty_group(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{PREFIX}.5.down_proj.g_idx"
    rewrite(folder, {name: torch.zeros(256, dtype=torch.int32)})
    refuses(capsys, folder, f"{name} puts no column into group 1, expected columns in all 2 groups")


def test_missing_tensor(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{PREFIX}.5.gate_proj.qweight"
    rewrite(folder, {name: None})
    refuses(capsys, folder, f"{name} is missing")


def test_experts_in_16_bits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever config.json says."""
    (folder / FILE).unlink()
    sizes = {"gate_proj": (256, 512), "up_proj": (256, 512), "down_proj": (512, 256)}
    experts = {f"{PREFIX}.{e}.{p}.weight": torch.ones(s).bfloat16() for e in range(EXPERTS) for p, s in sizes.items()}
    save_file(experts, folder / FILE)
    refuses(capsys, folder, "is not quantised", "its weights are BF16 without scales", "quant_method 'gptq'")


def test_a_backend_that_cannot_run_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--backend", "humming", "--device", "cpu")
    refuses(capsys, folder, "'humming' does not fit, and is never replaced", "device is cpu", arguments=arguments)
