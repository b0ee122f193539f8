"""Rows of one column, whose quantized rows are padded with zeros."""

from __future__ import annotations

import pytest
from moe_core import DeviceInfo, FusedMoEConfig, kFp8DynamicTensorSym, kFp8StaticTensorSym
from moe_core.kernels.launch.launch import record
from moe_core.testing.meta_layers import call_on_meta
from moe_fp8.experts.triton_scaled_mm import TritonFp8Experts


@pytest.mark.parametrize("sizes", [(1, 64), (64, 1), (64, 64)])
def test_kernels_know_rows_of_one_column(sizes: tuple[int, int]) -> None:
    config = FusedMoEConfig(2, 1, *sizes)
    keys = {"weight_key": kFp8StaticTensorSym, "activation_key": kFp8DynamicTensorSym}
    made = TritonFp8Experts(config, device=DeviceInfo.parse("sm90"), **keys)
    with record() as launches:
        call_on_meta(made, 631)
    rows = [launch.arguments["rows"] for launch in launches if launch.name == "quantize_rows_kernel"]
    assert rows
    for one in rows:
        assert one.single.value == (one.columns == 1)
