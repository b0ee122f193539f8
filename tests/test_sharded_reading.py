"""Tensor-parallel ranks read their columns, expert-parallel ones their experts: the same values, and how many bytes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import FusedMoELayer, FusedMoEParallelConfig, kFp8Dynamic64Sym, load_layer
from moe_core._support.open_file import OpenFile
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.testing.checkpoints import CONFIG, PREFIX, Experts, write
from moe_kit.fuzz.columns import check_columns
from torch import Tensor

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PLAIN: dict[str, Any] = {}


def blocks(form: str) -> dict[str, Tensor]:
    experts = Experts((128, 128), hidden=192, inter=448)
    if form == "one by one":
        return experts.tensors(suffix="weight_scale_inv")
    return experts.stacked(lambda grid: grid, "_scale_inv", transposed=form == "transposed")


def plain(form: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    if form == "one by one":
        shapes = {"gate": (448, 192), "up": (448, 192), "down": (192, 448)}
        return {f"{PREFIX}.{e}.{n}_proj.weight": matrix(*shape) for e in range(3) for n, shape in shapes.items()}
    up, down = matrix(3, 896, 192), matrix(3, 192, 448)
    turned = form in ("transposed", "gpt_oss")
    found = {
        f"{PREFIX}.gate_up_proj": up.mT.contiguous() if turned else up,
        f"{PREFIX}.down_proj": down.mT.contiguous() if turned else down,
    }
    biases = {f"{PREFIX}.gate_up_proj_bias": matrix(3, 896), f"{PREFIX}.down_proj_bias": matrix(3, 192)}
    return found | biases if form == "gpt_oss" else found


def folder(top: Path, tensors: dict[str, Tensor], quantization: dict[str, Any], **changes: Any) -> Path:
    sizes = {"hidden_size": 192, "moe_intermediate_size": 448, "intermediate_size": 448}
    stated = {"quantization_config": quantization} if quantization else {}
    return write(top, tensors, {**CONFIG, **sizes, **stated, **changes})


@pytest.mark.parametrize("form", ["one by one", "stacked", "transposed"])
def test_blocks(form: str, tmp_path: Path) -> None:
    assert check_columns(folder(tmp_path, blocks(form), BLOCKS)) == 128


@pytest.mark.parametrize("gap", [0, 1 << 20], ids=["piece by piece", "together"])
@pytest.mark.parametrize("form", ["one by one", "stacked", "transposed", "gpt_oss"])
@pytest.mark.parametrize("online", ["fp8_per_block", "fp8_per_channel"])
def test_16_bit_experts_quantized_at_load(
    form: str, online: str, gap: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks have the scales of the whole layer, whether the columns of a scale are on one rank or not."""
    monkeypatch.setattr("moe_core.checkpoint.experts.sliced.GAP_BYTES", gap)
    changes: dict[str, Any] = {"model_type": "gpt_oss", "num_local_experts": 3} if form == "gpt_oss" else {}
    checkpoint = Checkpoint.open(folder(tmp_path, plain(form), PLAIN, **changes))
    whole = read_layer(checkpoint, quantize=online).weights()
    found = []
    for rank in range(3):
        source = read_layer(checkpoint, quantize=online, parallel=FusedMoEParallelConfig(tp_size=3, tp_rank=rank))
        found.append((source.config.intermediate_size, source.weights()))
    assert sum(size for size, _ in found) == 448
    gate_and_up = [part.w13.view(torch.uint8).view(3, 2, size, 192) for size, part in found]
    assert torch.equal(torch.cat(gate_and_up, 2).flatten(1, 2), whole.w13.view(torch.uint8))
    assert torch.equal(torch.cat([part.w2.view(torch.uint8) for _, part in found], 2), whole.w2.view(torch.uint8))
    assert whole.w2_scale is not None
    scales = [part.w2_scale for _, part in found if part.w2_scale is not None]
    if online == "fp8_per_block":
        assert torch.equal(torch.cat(scales, 2), whole.w2_scale)
    else:
        assert all(torch.equal(scale, whole.w2_scale) for scale in scales)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of bytes of reads from here on."""
    counted: list[int] = []
    read_all = OpenFile.read_all

    def count(self: OpenFile, parts: Iterable[tuple[memoryview, int]]) -> None:
        found = list(parts)
        counted.extend(len(buffer) for buffer, _ in found)
        read_all(self, found)

    monkeypatch.setattr(OpenFile, "read_all", count)
    return counted


@pytest.mark.parametrize("form", ["one by one", "stacked", "transposed"])
def test_a_rank_reads_what_it_keeps(form: str, tmp_path: Path, bytes_read: list[int]) -> None:
    """No byte of other experts; of other columns those alone between pieces less than a page apart."""
    inter, hidden, tp = 16384, 128, 4
    experts = Experts((128, 128), hidden=hidden, inter=inter)
    grid = "weight_scale_inv"
    tensors = experts.tensors(suffix=grid) if form == "one by one" else experts.stacked(lambda g: g, "_scale_inv")
    if form == "transposed":
        tensors = experts.stacked(lambda g: g, "_scale_inv", transposed=True)
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inter}
    checkpoint = Checkpoint.open(write(tmp_path, tensors, {**CONFIG, **sizes, "quantization_config": BLOCKS}))
    for rank, ep in ((0, 1), (3, 1), (1, 3)):
        parallel = FusedMoEParallelConfig(tp_size=tp, tp_rank=rank, ep_size=ep, ep_rank=ep - 1)
        source = read_layer(checkpoint, parallel=parallel)
        bytes_read.clear()
        weights = source.weights()
        kept = weights.nbytes
        assert kept == 3 // ep * 3 * inter * hidden // tp * (1 + 4 / 128**2)
        # a row of scales has 512 bytes: read whole, then cut
        scales = 3 // ep * 3 * inter * hidden // 128**2 * 4
        assert sum(bytes_read) - kept <= scales
        assert sum(bytes_read) >= kept


def test_columns_less_than_a_page_apart_are_read_together(tmp_path: Path, bytes_read: list[int]) -> None:
    checkpoint = Checkpoint.open(folder(tmp_path, blocks("one by one"), BLOCKS))
    source = read_layer(checkpoint, parallel=FusedMoEParallelConfig(tp_size=3, tp_rank=1))
    bytes_read.clear()
    source.weights()
    # one read for each matrix, and one for each scale
    assert len(bytes_read) == 3 * 2 * 3


def test_ranks_whose_shares_part_blocks_are_equal_and_reloaded(tmp_path: Path) -> None:
    """64 columns each of blocks of 128; as stored and quantized at load, which takes 16-bit weights again."""
    stored, trained = (
        folder(tmp_path / "8", blocks("one by one"), BLOCKS),
        folder(tmp_path / "16", plain("stacked"), {}),
    )
    for path, quantize in ((stored, None), (trained, "fp8_per_block")):
        options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "quantize": quantize}
        whole = load_layer(path, **options)
        ranks = [
            load_layer(path, parallel=FusedMoEParallelConfig(tp_size=7, tp_rank=rank), **options) for rank in range(7)
        ]
        assert {rank.config.intermediate_size for rank in ranks} == {64}
        assert {rank.selection.activation_key for rank in ranks} == {kFp8Dynamic64Sym}
        topk_weights, topk_ids = torch.rand(4, 3, generator=torch.Generator().manual_seed(1)).topk(2)
        x = torch.randn(4, 192, generator=torch.Generator().manual_seed(0))

        def output(layer: FusedMoELayer) -> Tensor:
            return layer(x, topk_weights=topk_weights, topk_ids=topk_ids)  # noqa: B023 - called in this turn

        expected, found = output(whole), torch.stack([output(rank) for rank in ranks]).sum(0)
        # x and h, in finer groups, have errors of half a step of e4m3 in either run, and gate and up are multiplied
        assert float((found - expected).norm()) <= 4 * 2**-4 * float(expected.norm())
        for rank in ranks:
            for _, tensor in rank.weights.tensors():
                tensor.view(torch.uint8).zero_()
            rank.reload(path)
        assert torch.equal(torch.stack([output(rank) for rank in ranks]).sum(0), found)
    part = read_layer(Checkpoint.open(trained), settings=None, quantize="fp8_per_block").layout.stored.load_columns(
        whole.config, 64, 128, experts=(0, 1, 2)
    )
    before = output(ranks[1])
    ranks[1].reload(part)
    # its blocks begin with the rank's columns now: other scales, the same weights within half a step
    assert float((output(ranks[1]) - before).norm()) <= 2 * 2**-4 * float(before.norm())


def test_a_broken_value_is_named_with_the_columns_that_were_read(tmp_path: Path) -> None:
    tensors = blocks("one by one")
    tensors[f"{PREFIX}.1.down_proj.weight"].view(torch.uint8)[3, 300] = 0x7F
    checkpoint = Checkpoint.open(folder(tmp_path, tensors, BLOCKS))
    read_layer(checkpoint, parallel=FusedMoEParallelConfig(tp_size=3, tp_rank=0)).weights()
    broken = read_layer(checkpoint, parallel=FusedMoEParallelConfig(tp_size=3, tp_rank=1))
    with pytest.raises(ValueError, match=r"1\.down_proj\.weight .*256"):
        broken.weights()
