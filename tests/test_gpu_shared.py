"""Several processes on one GPU: each gets what it would get alone."""

from __future__ import annotations

import multiprocessing
from functools import partial

import pytest
from moe_core_gpu_shared import differing_calls
from moe_core_layers import all_kinds

KINDS = (
    "fp8-kFp8Static128BlockSym-kFp8Dynamic128Sym",
    "fp8-kFp8StaticChannelSym-kFp8DynamicTokenSym",
    "int8-kInt8StaticChannelSym-kInt8DynamicTokenSym",
    "int8-kInt4W4A8StaticChannelSym-kInt8DynamicTokenSym",
    "mxfp4-kMxfp4Static-16-bit",
    "wna16-kInt4Static32-16-bit",
)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 700])
def test_processes_that_share_a_gpu_get_their_own_results(tokens: int) -> None:
    kinds = [kind for kind in all_kinds() if str(kind) in KINDS]
    assert len(kinds) == len(KINDS)
    with multiprocessing.get_context("spawn").Pool(len(kinds)) as pool:
        found = pool.map_async(partial(differing_calls, tokens=tokens, seconds=15), kinds, chunksize=1).get(timeout=180)
    for kind, (calls, wrong) in zip(kinds, found, strict=True):
        assert calls
        assert not wrong, f"{kind}: {len(wrong)} of {calls} calls: {wrong[:3]}"
