"""``moe`` on a gpt-oss checkpoint: quickstart, explain, run, and bad input in whole folders."""

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
from moe_core import ConfigError, load_layer
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.cli import main
from moe_core.testing.tolerance import expected_output
from moe_mxfp4.quickstart import CONFIG, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "model.layers.0.mlp.experts"
INDEX = "model.safetensors.index.json"
SHARD = "model-00000-of-00001.safetensors"


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


def rewrite(folder: Path, name: str, tensor: Tensor | None) -> None:
    """Replace a tensor of the first layer, or remove it (from the index too)."""
    tensors = load_file(folder / SHARD)
    index = json.loads((folder / INDEX).read_text())
    assert name in tensors
    if tensor is None:
        del tensors[name], index["weight_map"][name]
    else:
        tensors[name] = tensor.contiguous()
    for file in (SHARD, INDEX):
        (folder / file).unlink()
    save_file(tensors, folder / SHARD)
    (folder / INDEX).write_text(json.dumps(index))


def reconfigure(folder: Path, **changes: Any) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def test_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "--scheme", "mxfp4"]) == 0
    out = capsys.readouterr().out
    assert "MXFP4 (gpt-oss)" in out
    assert "within the tolerance" in out
    assert "on cpu: torch" in out


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_input_to_output(original: Path, tmp_path: Path, dtype: str, layer: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weights, ids = torch.rand(7, EXPERTS, generator=generator).topk(TOP_K, dim=1)
    stored = torch.randn(7, HIDDEN, generator=generator).to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    save_file({"hidden_states": stored, "topk_weights": weights, "topk_ids": ids}, tmp_path / "in.safetensors")
    files = ["--input", str(tmp_path / "in.safetensors"), "--output", str(tmp_path / "o.safetensors")]
    assert main(["run", str(original), "--layer", str(layer), "--dtype", dtype, *files]) == 0
    source = read_layer(Checkpoint.open(original), layer, dtype=stored.dtype)
    expected = expected_output(stored, source.weights(), source.config, topk_weights=weights, topk_ids=ids)
    expected.compare(load_file(tmp_path / "o.safetensors")["output"], "moe run")


def test_random_tokens_through_the_router(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Top-k of the logits with the router's bias, softmax over the k."""
    assert main(["run", str(original), "--tokens", "5", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["scheme"] == "mxfp4"
    assert data["format"] == "MXFP4 (gpt-oss)"
    assert (data["routing"], data["random_router_logits"]) == ("checkpoint router logits", False)
    assert data["selection"]["weight_key"] == "kMxfp4Static"


def test_explain_for_a_gpu_that_is_not_here(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(original), "--device", "sm90", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["scheme"] == "mxfp4"
    assert data["chosen"]
    assert data["activation"] == "swigluoai"


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
    content = (folder / SHARD).read_bytes()
    (folder / SHARD).unlink()
    for size in (0, 4, 1000, len(content) - 1):
        (folder / SHARD).write_bytes(content[:size])
        refuses(capsys, folder, f"{SHARD} is truncated")


@pytest.mark.parametrize("projection", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("end", ["blocks", "scales", "bias"])
def test_missing_tensor(folder: Path, capsys: pytest.CaptureFixture[str], end: str, projection: str) -> None:
    rewrite(folder, f"{PREFIX}.{projection}_{end}", None)
    refuses(capsys, folder, f"{PREFIX}.{projection}_{end} is missing in")


@pytest.mark.parametrize("end", ["blocks", "scales", "bias"])
def test_an_odd_row(folder: Path, capsys: pytest.CaptureFixture[str], end: str) -> None:
    name = f"{PREFIX}.gate_up_proj_{end}"
    rewrite(folder, name, load_file(folder / SHARD)[name][:, :-1])
    refuses(capsys, folder, f"{name} has shape [{2 * INTERMEDIATE - 1}", f"expected [{2 * INTERMEDIATE}")


def test_a_scale_that_is_no_number(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{PREFIX}.gate_up_proj_scales"
    scales = load_file(folder / SHARD)[name]
    scales[3, 5, 7] = scales[9, 0, 0] = 255
    rewrite(folder, name, scales)
    refuses(capsys, folder, f"{name} has 2 NaN (e8m0 code 255) values of", "first at [3, 5, 7]")


def test_a_size_that_blocks_cannot_hold(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reconfigure(folder, intermediate_size=INTERMEDIATE + 8)
    refuses(capsys, folder, f"{PREFIX}.gate_up_proj_blocks has shape [512, 16, 16], expected [528, 16, 16]")


def test_index_names_what_the_shard_has_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{PREFIX}.down_proj_scales"
    tensors = load_file(folder / SHARD)
    del tensors[name]
    (folder / SHARD).unlink()
    save_file(tensors, folder / SHARD)
    refuses(capsys, folder, f"says that {SHARD} holds '{name}', but it does not")


def test_experts_in_16_bits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever config.json says."""
    for file in (SHARD, INDEX, "model-00001-of-00001.safetensors"):
        (folder / file).unlink()
    experts = {
        f"{PREFIX}.gate_up_proj": torch.ones(EXPERTS, HIDDEN, 2 * INTERMEDIATE).bfloat16(),
        f"{PREFIX}.down_proj": torch.ones(EXPERTS, INTERMEDIATE, HIDDEN).bfloat16(),
    }
    experts |= {f"{name}_bias": tensor[:, 0].clone() for name, tensor in experts.items()}
    save_file(experts, folder / "model.safetensors")
    refuses(capsys, folder, "is not quantised", "its weights are BF16 without scales", "quant_method 'mxfp4'")


def test_a_backend_that_cannot_run_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--backend", "marlin", "--device", "cpu")
    refuses(capsys, folder, "'marlin' does not fit, and is never replaced", "device is cpu", arguments=arguments)


def test_a_rank_that_is_told_wrong_experts(folder: Path) -> None:
    """Ids beyond the file's."""
    with pytest.raises(ConfigError, match=rf"experts holds {EXPERTS}, expected ids within 0..{EXPERTS - 1}"):
        load_layer(folder, experts=[0, EXPERTS])
