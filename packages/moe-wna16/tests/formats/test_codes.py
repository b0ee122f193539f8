"""Words of any strides, brought into canonical bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from moe_core import FusedMoEParallelConfig
from moe_core.api.formats import Matrix
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.parallel.shard import shard_layer
from moe_core.testing.checkpoints import CONFIG, write
from moe_wna16.formats.codes import fields, rows_of_words
from moe_wna16.formats.gptq_packing import GptqPacking, ZeroPoints
from moe_wna16.formats.packing import Packing
from moe_wna16.formats.row_packing import CompressedTensorsPacking
from moe_wna16_words import Codes, packed_rows, words_and_zeros
from torch import Tensor


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [1, 2])
def test_words_whose_rows_are_not_in_one_piece(bits: int, count: int) -> None:
    """Of one word, they count as contiguous nevertheless."""
    codes = torch.randint(0, 2**bits, (5, count * 32 // bits), generator=torch.Generator().manual_seed(0))
    # [1, 5, count], as words that lie along the other dimension in a file are turned
    words = torch.empty(1, count, 5, dtype=torch.int32).mT.copy_(packed_rows(codes, bits))
    assert words.stride(-1) == 5
    assert torch.equal(fields(words, bits)[0].long(), codes)
    raw = packed_rows(codes, bits).view(torch.uint8)
    assert torch.equal(rows_of_words(words, bits, codes.shape[1])[0], raw)
    matrix = Matrix(("up",), *codes.shape)
    assert torch.equal(arranged(GptqPacking(bits, ZeroPoints.AS_IT_IS), "weight", words.mT, matrix)[0], raw)
    matrix = Matrix(("up",), *codes.mT.shape)
    zeros = arranged(CompressedTensorsPacking(bits), "zero_point", words.mT, matrix)
    assert torch.equal(zeros[0].long(), codes.mT)


def arranged(packing: Packing, role: str, stored: Tensor, matrix: Matrix) -> Tensor:
    """What becomes of a stored tensor of words."""
    rules = [rule for rule in packing.rules(32) if rule.role == role and torch.int32 in rule.dtypes]
    assert len(rules) == 1
    assert rules[0].arrange is not None
    return rules[0].arrange(stored, matrix)


def test_words_in_one_piece_are_not_copied() -> None:
    words = torch.zeros(2, 3, 1, dtype=torch.int32)
    assert rows_of_words(words, 4, 8).data_ptr() == words.data_ptr()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_rank_whose_zero_points_fill_one_word(tmp_path: Path, bits: int) -> None:
    inter = 192 + 16 // bits
    experts = Codes(bits, symmetric=False, inter=inter)
    weights = {"type": "int", "num_bits": bits, "strategy": "group", "group_size": 32, "symmetric": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
    }
    sizes = {"hidden_size": 96, "moe_intermediate_size": inter}
    folder = write(tmp_path, experts.tensors(words_and_zeros), {**CONFIG, **sizes, "quantization_config": quantization})
    checkpoint = Checkpoint.open(folder)
    source, parallel = read_layer(checkpoint), FusedMoEParallelConfig(tp_size=3, tp_rank=2)
    part = read_layer(checkpoint, parallel=parallel)
    assert part.config.intermediate_size == 16 // bits
    wanted = dict(shard_layer(source.config, source.weights(), parallel, plan=part.plan).weights.tensors())
    for name, found in part.weights().tensors():
        assert torch.equal(found, wanted[name]), name
