"""Activations that were asked for, instead of what a checkpoint says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import moe_core as mc
import pytest
import torch
from moe_core import ConfigError, QuantKey, SelectionError, kFp8DynamicTokenSym, kFp8StaticTensorSym, kMxfp8Dynamic
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.cli.main import main
from moe_core.reference.tolerance import expected_output
from moe_mxfp4.quickstart import MODEL


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small gpt-oss checkpoint."""
    path = tmp_path_factory.mktemp("gpt-oss")
    MODEL.write(path)
    return path


@pytest.mark.parametrize("key", [None, kFp8DynamicTokenSym, kMxfp8Dynamic], ids=str)
def test_a_layer_computes_with_them(folder: Path, key: QuantKey | None) -> None:
    source = read_layer(Checkpoint.open(folder), activation_key=key)
    assert source.activation_key == key
    config, weights = source.config, source.weights()
    assert weights.activation_key == key
    x = torch.randn(7, config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.randint(config.num_experts, (7, 1), generator=torch.Generator().manual_seed(2))
    ids = (ids + torch.arange(config.top_k)) % config.num_experts
    router = torch.rand(7, config.top_k, generator=torch.Generator().manual_seed(3))
    layer = mc.load_layer(folder, device="cpu", activation_key=key)
    expected_output(x, weights, config, topk_weights=router, topk_ids=ids).compare(
        layer(x, topk_weights=router, topk_ids=ids), str(key)
    )


def test_by_name_and_as_the_checkpoint_says(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    assert read_layer(checkpoint).activation_key is None
    assert read_layer(checkpoint, activation_key="kFp8DynamicTokenSym").activation_key == kFp8DynamicTokenSym


def test_what_cannot_be_had_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="activation"):
        mc.load_layer(folder, device="cpu", activation_key=kFp8StaticTensorSym)
    with pytest.raises(ConfigError, match="'fp8'"):
        mc.load_layer(folder, device="cpu", activation_key="fp8")
    with pytest.raises(SelectionError, match="activations"):
        mc.load_layer(folder, device="cpu", activation_key=kMxfp8Dynamic, backend="marlin")
    with pytest.raises(ConfigError, match="asked for"):
        mc.load_layer(folder, device="cpu", activation_key=replace(kFp8DynamicTokenSym, permuted=True))


@pytest.mark.parametrize(("argument", "key"), [((), None), (("kMxfp8Dynamic",), "kMxfp8Dynamic"), (("none",), None)])
@pytest.mark.parametrize("command", ["run", "explain"])
def test_the_command_line(
    folder: Path, command: str, argument: tuple[str, ...], key: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--activation-key", *argument) if argument else ()
    assert main([command, str(folder), "--device", "cpu", "--json", *given]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data.get("selection", data)["activation_key"] == key


@pytest.mark.parametrize(("scheme", "key"), [("mxfp4", None), ("wna16", None), ("fp8", "kFp8Dynamic128Sym")])
def test_nobody_asks(scheme: str, key: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Schemes of weights alone leave activations in 16 bits."""
    pytest.importorskip(f"moe_{scheme}")
    assert main(["explain", "--scheme", scheme, "--shape", "8,2,256,128", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["activation_key"] == key
