"""Weights that AutoRound's exporters pack are read to the numbers that it quantized them to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_kit.tool_models import EXPERTS, HIDDEN, check_weights, linear_model, save
from torch import Tensor, nn

pytest.importorskip("auto_round", reason="the nox session `tools` installs it")

SHAPES = {"model.layers.0.self_attn.q_proj": (HIDDEN, HIDDEN), **EXPERTS}


def model() -> nn.Module:
    return linear_model(SHAPES, torch.float32)


def quantize(tiny: nn.Module, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Attach the scales of AutoRound's own rounding to the modules and return the quantized weights."""
    from auto_round.data_type.utils import get_quant_func

    bits, data_type = settings["bits"], settings["data_type"]
    function, _ = get_quant_func(data_type, bits, settings["sym"])
    expected = {}
    for module in SHAPES:
        layer: Any = tiny.get_submodule(module)
        values, scale, zero = function(layer.weight.detach(), bits=bits, group_size=settings["group_size"])
        # as after tuning: packing rounds the weights again, which must be on the grid
        layer.weight.data = values
        rows = len(values)
        attributes = {"act_bits": 16, "act_data_type": data_type, **settings, "scale": scale.view(rows, -1)}
        attributes["zp"] = zero.view(rows, -1) if isinstance(zero, Tensor) else zero
        for key, value in attributes.items():
            setattr(layer, key, value)
        expected[module] = values.detach()
    return expected


def check(folder: Path, tiny: nn.Module, quantization: dict[str, Any], expected: dict[str, Tensor]) -> None:
    save(folder, tiny, quantization)
    check_weights(folder, expected, torch.float32)


def exported(tiny: nn.Module, settings: dict[str, Any], backend: str) -> dict[str, Any]:
    """Pack the model with the exporter of AutoRound's own format and return its config."""
    from auto_round.export.export_to_autoround.export import save_quantized_as_autoround

    written = {**settings, "to_quant_block_names": "model.layers", "regex_config": None, "autoround_version": "0.16.1"}
    layers = {name: {**settings, "in_blocks": True} for name in SHAPES}
    save_quantized_as_autoround(None, tiny, layer_config=layers, backend=backend, serialization_dict=written)
    return json.loads(json.dumps(written))  # type: ignore[no-any-return]


def integers(bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    return {"bits": bits, "group_size": group, "sym": symmetric, "data_type": "int"}


@pytest.mark.parametrize("backend", ["auto_round", "auto_round:auto_gptq"])
@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [4, 8])
def test_auto_round(tmp_path: Path, bits: int, symmetric: bool, group: int, backend: str) -> None:
    """Symmetric weights are always packed as ``auto_gptq``; asymmetric ones keep their zero points as they are."""
    tiny, settings = model(), integers(bits, group, symmetric)
    expected = quantize(tiny, settings)
    quantization = exported(tiny, settings, backend)
    assert quantization["packing_format"] == ("auto_round:auto_gptq" if symmetric else backend)
    check(tmp_path, tiny, quantization, expected)


@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [4, 8])
def test_auto_gptq(tmp_path: Path, bits: int, symmetric: bool, group: int) -> None:
    from auto_round.export.export_to_autogptq.export import pack_layer

    tiny, settings = model(), integers(bits, group, symmetric)
    expected = quantize(tiny, settings)
    for name in SHAPES:
        pack_layer(name, tiny, "auto_gptq", "cpu")
    quantization = {"quant_method": "gptq", "desc_act": False, **settings}
    check(tmp_path, tiny, quantization, expected)


@pytest.mark.parametrize("method", ["awq", "auto-round"])
@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_auto_awq(tmp_path: Path, symmetric: bool, group: int, method: str) -> None:
    from auto_round.export.export_to_awq.export import pack_layer

    tiny, settings = model(), integers(4, group, symmetric)
    expected = quantize(tiny, settings)
    for name in SHAPES:
        pack_layer(name, tiny, "auto_awq", "cpu")
    configs: dict[str, dict[str, Any]] = {
        "awq": {"version": "gemm", "zero_point": not symmetric, "bits": 4, "group_size": group},
        "auto-round": {"packing_format": "auto_round:auto_awq", **settings},
    }
    check(tmp_path, tiny, {"quant_method": method, **configs[method]}, expected)


@pytest.mark.parametrize("data_type", ["mx_fp", "mx_fp_rceil"])
@pytest.mark.parametrize("bits", [4, 8])
def test_mx(tmp_path: Path, bits: int, data_type: str) -> None:
    from auto_round.export.export_to_autoround.export_to_nvfp_mx import pack_layer

    tiny, settings = model(), {"bits": bits, "group_size": 32, "sym": True, "data_type": data_type}
    expected = quantize(tiny, settings)
    for name in SHAPES:
        pack_layer(name, tiny, "auto_round", "cpu")
    quantization = {"quant_method": "auto-round", "packing_format": "auto_round:mx_fp", "act_bits": 16, **settings}
    check(tmp_path, tiny, quantization, expected)
