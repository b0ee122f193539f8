"""What the files say is what is loaded, and what is broken is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from moe_core import FusedMoEParallelConfig, QuantKey, kInt8DynamicTokenSym, kInt8StaticChannelSym, load_layer
from moe_core.testing.checkpoints import PER_CHANNEL, PREFIX, E, Experts, K, check, int8_codes, refused, source
from torch import Tensor

EXPERTS = Experts(PER_CHANNEL, make=int8_codes)
EXAMPLE = {"quant_method": "example"}


def tensors() -> dict[str, Tensor]:
    """As the tool writes them."""
    return EXPERTS.tensors(torch.flatten, "row_scale")


@pytest.mark.parametrize(("bits", "activation_key"), [(8, kInt8DynamicTokenSym), (16, None)])
def test_weights_are_those_that_were_written(tmp_path: Path, bits: int, activation_key: QuantKey | None) -> None:
    found = source(tmp_path, tensors(), {**EXAMPLE, "activation_bits": bits})
    assert (found.scheme, found.format.name) == ("int8", "INT8 of an imaginary tool")
    check(found, EXPERTS, kInt8StaticChannelSym, activation_key)


def test_ranks_read_their_parts(tmp_path: Path) -> None:
    source(tmp_path, tensors(), {**EXAMPLE, "activation_bits": 16})

    def output(parallel: FusedMoEParallelConfig) -> Tensor:
        layer = load_layer(tmp_path, parallel=parallel, device="cpu", dtype=torch.float32)
        routing = {"topk_weights": torch.full((E, 2), 0.5), "topk_ids": torch.arange(2 * E).reshape(E, 2) % E}
        y: Tensor = layer(torch.ones(E, K).cumsum(0), **routing)
        return y

    whole = output(FusedMoEParallelConfig())
    ranks = output(FusedMoEParallelConfig(tp_size=2, tp_rank=0)) + output(FusedMoEParallelConfig(tp_size=2, tp_rank=1))
    assert float((ranks - whole).norm() / whole.norm()) < 2**-20


def test_what_is_broken_is_named(tmp_path: Path) -> None:
    name = f"{PREFIX}.0.down_proj.row_scale"
    for number, broken in enumerate((tensors()[name][:-1], tensors()[name].neg(), tensors()[name].half())):
        refused(tmp_path / str(number), {**tensors(), name: broken}, EXAMPLE, name)
    other = {name.replace("row_scale", "zero_point"): torch.ones(1) for name in tensors() if name.endswith("row_scale")}
    refused(tmp_path / "zero", {**tensors(), **other}, EXAMPLE, "zero_point")
    refused(tmp_path / "bits", tensors(), {**EXAMPLE, "activation_bits": 4}, "activation_bits is 4, expected 8 or 16")
