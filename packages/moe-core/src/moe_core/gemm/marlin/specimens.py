"""Launches of the family beside its layers: what puts words in order, and single columns that are read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from moe_core.device import DeviceInfo
from moe_core.jit.specimen import Specimen

#: experts, top-k, hidden size, intermediate size: no multiples of anything
_SHAPE = (6, 2, 1101, 1003)
#: single columns pass through registers (most on sm90, Triton 3.9: 592)
_MAX_SPILLS = 640


def specimens(target: DeviceInfo) -> Iterator[Specimen]:
    """The order of words, and layers with an activation order whose groups were filled up."""
    if target.kind != "cuda" or target.capability < 80:
        return
    for bits, order in ((4, "integers"), (8, "integers"), (4, "e2m1"), (4, "e4m3")):
        for interleaved in (False, True):
            name = f"marlin words {bits} bits {order}{' interleaved' * interleaved}"
            yield Specimen(name, partial(_order, bits, order, interleaved))
    for tokens in (1, 300):
        yield Specimen(f"marlin single columns {tokens}", partial(_indexed, target, tokens), _MAX_SPILLS)


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _order(bits: int, order: str, interleaved: bool) -> None:
    from moe_core.gemm.marlin.words import order_words

    codes = _meta(8, 4096, 2048 * bits // 8, dtype=torch.uint8)
    order_words(codes, 2048, bits, order=order, interleaved=interleaved, backend="triton")


def _indexed(target: DeviceInfo, tokens: int) -> None:
    """Which columns are read is in the values of an activation order, which meta tensors do not have."""
    from moe_core.gemm.fused.layer import FusedLayer
    from moe_core.gemm.fused.plain import PlainScheme
    from moe_core.gemm.fused.scheme import CallShape
    from moe_core.gemm.heuristics import LayerProblem, launch_plan
    from moe_core.gemm.heuristics.mixed_input import MAX_PARTS
    from moe_core.gemm.launch import Activation, Routing
    from moe_core.gemm.marlin.integers import integer_functions
    from moe_core.gemm.marlin.weight import MarlinMatrix
    from moe_core.gemm.marlin.words import interleaved_rows, words_of
    from moe_core.workspace import WorkspaceSpec

    experts, top_k, hidden, size = _SHAPE
    dtype = torch.float16

    def matrix(rows: int, outputs: int, columns: int, interleaved: bool) -> MarlinMatrix:
        wide = columns + 64
        return MarlinMatrix(
            _meta(experts, rows, words_of(wide, 4), dtype=torch.int32),
            4,
            outputs,
            wide,
            32,
            _meta(experts, -(-wide // 32), rows, dtype=torch.float32),
            channel_scales=_meta(experts, rows, dtype=torch.float32),
            bias=_meta(experts, outputs * (2 if interleaved else 1), dtype=dtype),
            interleaved=interleaved,
            index=_meta(experts, wide, dtype=torch.int32),
            pre_scales=_meta(experts, columns, dtype=torch.float32),
        )

    w13, w2 = matrix(interleaved_rows(2 * size), size, hidden, True), matrix(hidden, hidden, size, False)
    scheme = PlainScheme(w13.activation_columns, w2.activation_columns)
    first, second = w13.gemm_weight(integer_functions), w2.gemm_weight(integer_functions)
    problem = LayerProblem("mixed_input", "int4", experts, top_k, hidden, size, capability=target.capability)
    specs = scheme.workspaces(
        CallShape(tokens, top_k, experts, hidden, size, dtype), WorkspaceSpec("partials", (MAX_PARTS,), torch.float32)
    )
    x = _meta(tokens, hidden, dtype=dtype)
    FusedLayer(first, second, scheme, Activation("silu"))(
        x,
        torch.empty_like(x),
        routing=Routing(_meta(tokens, top_k, dtype=torch.int32), _meta(tokens, top_k, dtype=torch.float32), experts),
        plan=launch_plan(problem, tokens),
        workspace={spec.name: _meta(*spec.shape, dtype=spec.dtype) for spec in specs},
    )
