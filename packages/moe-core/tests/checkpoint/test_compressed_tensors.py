from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from moe_core import CheckpointError
from moe_core.checkpoint import Checkpoint, LayerExperts, find_layer
from moe_core.checkpoint.compressed_tensors import quant_group
from moe_core_checkpoints import expert_tensors, write

PREFIX = "model.layers.0.mlp.experts"


@pytest.fixture
def layer(tmp_path: Path) -> LayerExperts:
    return find_layer(Checkpoint.open(write(tmp_path, expert_tensors())))


def group(*targets: object, **weights: Any) -> dict[str, Any]:
    return {"targets": list(targets), "weights": {"type": "int", "num_bits": 8, **weights}}


def groups(*found: dict[str, Any], **top: Any) -> dict[str, Any]:
    return {"config_groups": {f"group_{i}": one for i, one in enumerate(found)}, **top}


def test_arguments(layer: LayerExperts) -> None:
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 128,
        "symmetric": False,
        "dynamic": False,
        "actorder": "weight",
        "block_structure": None,
        "scale_dtype": "torch.uint8",
    }
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    one = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": "int-quantized"}
    found = quant_group(groups(one, format="mixed-precision"), layer)
    assert (found.name, found.format) == ("group_0", "int-quantized")
    args = found.weights
    assert (args.type, args.num_bits, args.strategy, args.group_size) == ("int", 4, "group", 128)
    assert (args.symmetric, args.dynamic, args.actorder, args.scale_dtype) == (False, False, "weight", "torch.uint8")
    assert str(args) == "static int4 by group 128"
    assert found.inputs is not None
    assert (found.inputs.strategy, found.inputs.dynamic, found.inputs.symmetric) == ("token", True, True)
    assert quant_group(groups(group("Linear"), format="pack-quantized"), layer).format == "pack-quantized"


@pytest.mark.parametrize(
    ("said", "strategy"), [({}, "tensor"), ({"group_size": -1}, "channel"), ({"group_size": 32}, "group")]
)
def test_strategies_that_are_implied(layer: LayerExperts, said: dict[str, Any], strategy: str) -> None:
    assert quant_group(groups(group("Linear", **said)), layer).weights.strategy == strategy


def test_names_win_over_patterns_over_classes(layer: LayerExperts) -> None:
    names = [f"{PREFIX}.0.{p}_proj" for p in ("gate", "up", "down")]
    found = groups(group("Linear"), group("re:.*experts.*"), group(*names), group("re:.*attn"))
    assert quant_group(found, layer).name == "group_2"
    del found["config_groups"]["group_2"]
    assert quant_group(found, layer).name == "group_1"
    del found["config_groups"]["group_1"]
    assert quant_group(found, layer).name == "group_0"


def test_patterns_match_from_the_start(layer: LayerExperts) -> None:
    """As re.match does: "mlp" alone is no module of ours."""
    assert quant_group(groups(group("re:mlp"), group("Linear")), layer).name == "group_1"


def test_groups_that_say_the_same(layer: LayerExperts) -> None:
    """Projections of different groups are fine where those agree."""
    assert quant_group(groups(group("re:.*gate"), group("re:.*(up|down)")), layer).weights.num_bits == 8


def test_one_group_needs_no_target(layer: LayerExperts) -> None:
    """Tools write module paths of another naming than their file's."""
    assert quant_group(groups(group("re:.*block_sparse_moe.experts.*w1$")), layer).name == "group_0"
    kv = {"targets": ["re:.*attn"], "weights": None}
    assert quant_group(groups(kv, group("re:.*w1$")), layer).name == "group_1"


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({}, "config.json: config_groups is None, expected an object with groups"),
        ({"config_groups": [1]}, "config_groups is [1], expected an object with groups"),
        (groups({"targets": ["Linear"], "weights": None}), "no group of config_groups says how weights are quantised"),
        (groups(group("a"), group("b")), f"no target of config_groups names {PREFIX}.0.down_proj"),
        (groups(group("re:("), group("b")), "group_0: the target 're:(' is no pattern:"),
        (groups(group("re:" + "a" * 2000), group("b")), "is no pattern: it is too long"),
        (groups(group("Linear", num_bits=[8])), "group_0.weights: num_bits is [8], expected an integer"),
        (groups(group("Linear", strategy=3)), "weights: strategy is 3, expected a name"),
        (groups(group("Linear", symmetric="no")), "weights: symmetric is 'no', expected true or false"),
        (groups(group("Linear", dynamic=2)), "weights: dynamic is 2, expected true, false or a name"),
        (groups(group("Linear", block_structure="128")), "block_structure is '128', expected [rows, columns]"),
        (groups({"weights": [8]}), "config_groups.group_0: weights is [8], expected an object"),
    ],
)
def test_what_is_refused(layer: LayerExperts, quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        quant_group(quantization, layer)


def test_targets_that_are_no_text(layer: LayerExperts) -> None:
    assert quant_group(groups(group(3, None), group("Linear")), layer).name == "group_1"
    assert quant_group(groups({**group(), "targets": 5}, group("Linear")), layer).name == "group_1"
