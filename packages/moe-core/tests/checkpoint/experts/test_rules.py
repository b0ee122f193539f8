"""Tables of tensors: rows that a scheme outside this repository may need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from moe_core import CheckpointError, QuantKey, kInt8StaticChannelSym
from moe_core.api.formats import (
    FLOATS,
    ExpertStorage,
    LayerExperts,
    QuantizedLayout,
    TensorRule,
    Values,
    per_matrix,
    scalar,
)
from moe_core.checkpoint import Checkpoint, find_layer
from moe_core.checkpoint.experts.matrices import ExpertMatrices
from moe_core.checkpoint.model import read_model
from moe_core_checkpoints import E, K, N, expert_tensors, write
from torch import Tensor

PREFIX = "model.layers.0.mlp.experts"
CODES = TensorRule("weight", lambda m: [(m.rows, m.cols)], (torch.int8,), "weight", values=None)
SCALE = TensorRule("weight_scale", lambda m: [(m.rows, 1)], FLOATS, "scale")
#: a scale of the whole matrix, by which ModelOpt multiplies and compressed-tensors divides
SECOND = TensorRule(
    "weight_scale_2", scalar, FLOATS, "scale2", values=Values.POSITIVE, arrange=per_matrix, by_rows=False
)
DIVISOR = replace(SECOND, suffix="weight_global_scale", reciprocal=True)


@dataclass(frozen=True)
class Storage(ExpertStorage):
    rules: tuple[TensorRule, ...]
    activation: QuantKey | None = None
    why: str = "quant_method two_scales"

    def layout(self, layer: LayerExperts) -> QuantizedLayout:
        return QuantizedLayout(layer, kInt8StaticChannelSym, self.activation, self, self.rules)


def stored(**suffixes: Tensor) -> dict[str, Tensor]:
    """Experts with codes and scales, and with further tensors of each projection."""
    tensors: dict[str, Tensor] = {}
    for number, (name, plain) in enumerate(expert_tensors().items()):
        tensors[name] = torch.full_like(plain, number + 1, dtype=torch.int8)
        tensors[f"{name}_scale"] = torch.ones(len(plain), 1)
        tensors |= {name.replace("weight", suffix): tensor * (number + 1) for suffix, tensor in suffixes.items()}
    return tensors


def load(folder: Path, tensors: dict[str, Tensor], *rules: TensorRule) -> dict[str, Tensor]:
    layer = find_layer(Checkpoint.open(write(folder, tensors)))
    config, layout = read_model(layer).config, Storage((CODES, SCALE, *rules)).layout(layer)
    layout.check_fits(config, experts=range(E))
    matrices = ExpertMatrices.of(layer, config)
    return layout.stacked(matrices.stacks, matrices, range(E), "cpu", has_bias=False)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_second_scale_is_one_more_row(tmp_path: Path, shape: tuple[int, ...]) -> None:
    factor, divisor = torch.full(shape, 0.25), torch.full(shape, 4.0)
    found = load(tmp_path / "a", stored(weight_scale_2=factor), SECOND, DIVISOR)
    assert found["w13_scale2"].shape == (E, 2)
    assert found["w2_scale2"].shape == (E, 1)
    names = [name for name in expert_tensors() if "gate" in name or "up" in name]
    every = {name: 0.25 * (number + 1) for number, name in enumerate(expert_tensors())}
    assert found["w13_scale2"].flatten().tolist() == [every[name] for name in names]
    found = load(tmp_path / "b", stored(weight_global_scale=divisor), DIVISOR)
    each = [4.0 * (number + 1) for number, name in enumerate(expert_tensors()) if name in names]
    assert found["w13_scale2"].flatten().tolist() == torch.tensor(each).reciprocal().tolist()


def test_either_of_two_rows(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="weight_scale_2"):
        load(tmp_path / "none", stored(), SECOND, DIVISOR)
    both = stored(weight_scale_2=torch.ones(()), weight_global_scale=torch.ones(()))
    with pytest.raises(CheckpointError, match="weight_global_scale"):
        load(tmp_path / "both", both, SECOND, DIVISOR)
    with pytest.raises(CheckpointError, match="weight_scale_2"):
        load(tmp_path / "zero", stored(weight_scale_2=torch.zeros(())), SECOND)
    whole = stored(weight_scale_2=torch.ones(()))
    some = {name: one for name, one in whole.items() if "up_proj.weight_scale_2" not in name}
    optional = replace(SECOND, required=False)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_scale_2"):
        load(tmp_path / "some", some, optional)


def test_what_no_row_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="weight_scale_2"):
        load(tmp_path, stored(weight_scale_2=torch.ones(())))


def test_axes_follow_from_shapes(tmp_path: Path) -> None:
    """A row of eight rows to an entry: shards begin at multiples of 8."""
    tensors = {}
    for name, plain in expert_tensors().items():
        tensors[name] = torch.ones(len(plain), plain.shape[1] // 8, dtype=torch.int32)
        tensors[f"{name}_scale"] = torch.ones(len(plain), 1)
    words = replace(CODES, shape=lambda m: [(m.rows, m.cols // 8)], dtypes=(torch.int32,), multiple=(1, 8))
    layer = find_layer(Checkpoint.open(write(tmp_path, tensors)))
    layout = Storage((words, SCALE)).layout(layer)
    assert layout.column_unit == 8
    assert layout.columns_of(8, 16, N).layer.shape("down", "weight") == (K, 1)
    assert layout.columns_of(8, 16, N).layer.shape("gate", "weight") == (8, K // 8)
    assert replace(layout, whole=True).column_unit is None
