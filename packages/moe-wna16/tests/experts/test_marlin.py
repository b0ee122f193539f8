"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from moe_core.device import DeviceInfo
from moe_core.gemm.activation_tile import load_indexed
from moe_core.jit.launch import record
from moe_core.testing import ConformanceTests
from moe_core.testing.compile_cases import experts_specimens
from moe_wna16.experts.marlin import BatchedMarlinWNA16Experts, MarlinWNA16Experts


class TestMarlinWNA16(ConformanceTests):
    experts = MarlinWNA16Experts
    interpreted_every = 3


class TestBatchedMarlinWNA16(ConformanceTests):
    experts = BatchedMarlinWNA16Experts
    interpreted_every = 8


def test_single_columns_are_compiled():
    """Of rows with an activation order, of which a rank has a part."""
    shards = [one for one in experts_specimens(MarlinWNA16Experts, DeviceInfo.parse("sm90")) if " shard " in one.name]
    assert shards
    for specimen in shards:
        with record() as launches:
            specimen.launch()
        gemms = [one.arguments["functions"] for one in launches if one.name == "grouped_gemm_kernel"]
        assert [functions.load_a for functions in gemms] == [load_indexed] * 2
