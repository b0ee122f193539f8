"""Small checkpoints with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from moe_core.checkpoint import Checkpoint
from moe_core.checkpoint.small_model import SmallModel, qwen3_moe
from torch import Tensor


def store(weight: Tensor) -> dict[str, Tensor]:
    return {".weight": weight.bfloat16()}


@pytest.mark.parametrize("layers", [1, 2])
def test_the_checkpoint_has_every_layer_and_is_the_same_for_a_seed(layers: int, tmp_path: Path) -> None:
    model = qwen3_moe({"quant_method": "mine"}, store, layers)
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        model.write(tmp_path / name, seed)
    first, again, other = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("first", "again", "other")
    )
    assert first == again != other
    checkpoint = Checkpoint.open(tmp_path / "first")
    assert checkpoint.moe_layers == tuple(range(layers))
    assert len(list((tmp_path / "first").glob("*.safetensors"))) == layers


def test_experts_are_stacked_or_separate() -> None:
    shapes = {}
    for stacked in (False, True):
        model = SmallModel(
            {"num_hidden_layers": 1}, store, {"down_proj": (8, 4)}, ("gate.weight", "gate.bias"), stacked
        )
        shapes[stacked] = {name: tuple(t.shape) for name, t in model._layer(0, torch.Generator()).items()}
    start = "model.layers.0.mlp"
    assert shapes[True][f"{start}.experts.down_proj.weight"] == (SmallModel.EXPERTS, 8, 4)
    assert shapes[False][f"{start}.experts.15.down_proj.weight"] == (8, 4)
    assert shapes[False][f"{start}.gate.bias"] == (SmallModel.EXPERTS,)
