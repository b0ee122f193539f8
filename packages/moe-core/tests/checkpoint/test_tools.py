from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from moe_core import CheckpointError
from moe_core.checkpoint import Checkpoint, LayerExperts, find_layer
from moe_core.checkpoint.auto_round import auto_round_settings
from moe_core.checkpoint.compressed_tensors import quant_group
from moe_core.checkpoint.gptq import gptq_settings
from moe_core.checkpoint.modelopt import is_modelopt, quant_algo
from moe_core.checkpoint.quark import quark_layer
from moe_core_checkpoints import expert_tensors, write

PREFIX = "model.layers.0.mlp.experts"


@pytest.fixture
def layer(tmp_path: Path) -> LayerExperts:
    return find_layer(Checkpoint.open(write(tmp_path, expert_tensors())))


def mixed(**layers: Any) -> dict[str, Any]:
    return {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


@pytest.mark.parametrize(
    ("method", "expected"), [("modelopt", True), ("modelopt_mixed", True), ("fp8", False), (None, False), (3, False)]
)
def test_method(method: object, expected: bool) -> None:
    assert is_modelopt({"quant_method": method}) is expected


def test_algorithm_in_capitals(layer: LayerExperts) -> None:
    assert quant_algo({"quant_algo": "w4a8_mxfp4_fp8"}, layer)[0] == "W4A8_MXFP4_FP8"


@pytest.mark.parametrize(
    "layers",
    [
        {PREFIX: {"quant_algo": "fp8", "group_size": 64}},
        {"model.layers.0.mlp": {"quant_algo": "FP8", "group_size": 64}, "model": {"quant_algo": "NVFP4"}},
        {"*.experts.*": {"quant_algo": "FP8", "group_size": 64}},
        {
            f"{PREFIX}.{expert}.{p}_proj": {"quant_algo": "FP8", "group_size": 64}
            for expert in range(4)
            for p in ("gate", "up", "down")
        },
    ],
)
def test_mixed_precision(layer: LayerExperts, layers: dict[str, Any]) -> None:
    algorithm, entries = quant_algo(mixed(**layers), layer)
    assert (algorithm, entries.integer("group_size")) == ("FP8", 64)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({}, "quant_algo is None, expected an algorithm"),
        ({"quant_algo": ["FP8"]}, "quant_algo is ['FP8'], expected a name"),
        ({"quant_algo": "mixed_precision"}, "quantized_layers is None, expected an object"),
        (mixed(lm_head={"quant_algo": "FP8"}), f"quantized_layers names neither {PREFIX}.0.down_proj nor a part"),
        (mixed(**{PREFIX: 3}), f"{PREFIX} is 3, expected an object"),
        (mixed(**{PREFIX: {}}), f"quantized_layers.{PREFIX}: quant_algo is None, expected an algorithm"),
        (
            mixed(**{PREFIX: {"quant_algo": "FP8"}, f"{PREFIX}.0.up_proj": {"quant_algo": "NVFP4"}}),
            f"the experts of {PREFIX} are quantised by FP8 and by NVFP4",
        ),
    ],
)
def test_what_is_refused(layer: LayerExperts, quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        quant_algo(quantization, layer)


# ------------------------------------------------------------------ Quark


def test_quark_by_name_class_and_globally(layer: LayerExperts) -> None:
    quantization: dict[str, Any] = {
        "layer_quant_config": {"*attn*": {"weight": {"dtype": "a"}}, "*mlp.experts*": {"weight": {"dtype": "b"}}},
        "layer_type_quant_config": {"<class 'torch.nn.modules.linear.Linear'>": {"weight": {"dtype": "c"}}},
        "global_quant_config": {"weight": {"dtype": "d"}},
    }
    for part, dtype in (("layer_quant_config", "b"), ("layer_type_quant_config", "c"), ("global_quant_config", "d")):
        found = quark_layer(dict(quantization), layer)
        assert not isinstance(found, str)
        assert found.weight.dtype == dtype
        del quantization[part]
    with pytest.raises(CheckpointError, match="global_quant_config is None, expected an object"):
        quark_layer(dict(quantization), layer)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [({"weight": None}, "weight is null"), ({"weight": {}, "output_tensors": {}}, "output_tensors are quantised")],
)
def test_quark_experts_that_nothing_reads(layer: LayerExperts, entries: dict[str, Any], reason: str) -> None:
    found = quark_layer({"global_quant_config": entries}, layer)
    assert isinstance(found, str)
    assert f"global_quant_config: {reason}" in found


def test_quark_projections_that_differ(layer: LayerExperts) -> None:
    quantization = {
        "layer_quant_config": {"*down_proj": {"weight": {"dtype": "fp8_e4m3"}}},
        "global_quant_config": {"weight": {"dtype": "fp4"}},
    }
    with pytest.raises(CheckpointError, match=f"the experts of {PREFIX} are quantised differently"):
        quark_layer(quantization, layer)


def test_quantized_layers_that_contradict_the_algorithm(layer: LayerExperts) -> None:
    layers = {"lm_head": {"quant_algo": "NVFP4"}, f"{PREFIX}.1.up_proj": {"quant_algo": "fp8"}}
    assert quant_algo({"quant_algo": "FP8", "quantized_layers": layers}, layer)[0] == "FP8"
    with pytest.raises(CheckpointError, match=r"quant_algo is MXFP8, but .*1.up_proj.quant_algo is 'fp8' for"):
        quant_algo({"quant_algo": "MXFP8", "quantized_layers": layers}, layer)


# ------------------------------------------------------------------ every tool

WEIGHTS = {"type": "int", "num_bits": 8}


@pytest.mark.parametrize(
    ("parse", "quantization"),
    [
        (quant_group, {"config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}}}),
        (quant_algo, {"quant_algo": "FP8"}),
        (quark_layer, {"global_quant_config": {"weight": {"dtype": "fp4"}}}),
        (gptq_settings, {"bits": 4}),
        (auto_round_settings, {"bits": 4}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_config_is_understood_once(layer: LayerExperts, parse: Callable[..., Any], quantization: Any) -> None:
    """Formats of several schemes ask for it; another config, or another layer's, is another."""
    found = parse(quantization, layer)
    assert parse(quantization, layer) is found
    changed = copy.deepcopy(quantization)
    assert parse(changed, layer) is not found
    assert parse(quantization, find_layer(layer.checkpoint)) is not found
