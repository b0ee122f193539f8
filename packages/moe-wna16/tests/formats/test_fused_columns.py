"""Tensor-parallel parts of gate and up in one matrix, whose words hold several rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import CheckpointError, FusedMoEParallelConfig
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.parallel.shard import shard_layer
from moe_core.testing.checkpoints import CONFIG, write
from moe_wna16_words import Codes, Matrix, Tensors, awq, words_and_zeros

HIDDEN = 96
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 4, "version": "gemm", "zero_point": True}
WEIGHTS = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 4, "symmetric": False}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
}
FORMATS: dict[str, tuple[Callable[[Matrix, int], Tensors], dict[str, Any]]] = {
    "awq": (awq, AWQ),
    "compressed-tensors": (words_and_zeros, PACKED),
}


def opened(folder: Path, name: str, inter: int) -> Checkpoint:
    writer, quantization = FORMATS[name]
    experts = Codes(group=4, symmetric=False, hidden=HIDDEN, inter=inter)
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": inter}
    return Checkpoint.open(
        write(folder, experts.fused(writer), {**CONFIG, **sizes, "quantization_config": quantization})
    )


@pytest.mark.parametrize(
    ("name", "inter", "unit"),
    [
        ("awq", 192, 8),
        ("awq", 100, None),
        ("awq", 196, None),
        ("compressed-tensors", 192, 8),
        ("compressed-tensors", 100, None),
        ("compressed-tensors", 196, None),
        # words of both together are as many as those of gate and up apart
        ("compressed-tensors", 198, None),
    ],
)
def test_ranks_have_their_rows_of_words_that_hold_gate_and_up(
    tmp_path: Path, name: str, inter: int, unit: int | None
) -> None:
    checkpoint = opened(tmp_path, name, inter)
    source = read_layer(checkpoint)
    whole = source.weights()
    for tp_size in (2, 3) if inter > 128 else (2,):
        for rank in range(tp_size):
            parallel = FusedMoEParallelConfig(tp_size=tp_size, tp_rank=rank)
            part = read_layer(checkpoint, parallel=parallel)
            wanted = dict(shard_layer(source.config, whole, parallel, plan=part.plan).weights.tensors())
            found = dict(part.weights().tensors())
            assert found.keys() == wanted.keys()
            for tensor, values in wanted.items():
                assert torch.equal(found[tensor], values), (tp_size, rank, tensor)
    assert source.layout.column_unit == unit


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_shared_words_are_not_read_by_themselves(tmp_path: Path, name: str) -> None:
    source = read_layer(opened(tmp_path, name, 100))
    with pytest.raises(CheckpointError, match=r"gate_up_proj\.(qweight|weight_zero_point) .*8 rows"):
        source.layout.load_columns(source.whole, 0, 64, experts=source.experts)
