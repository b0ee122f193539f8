"""SGLang's own fused kernel, in Triton's interpreter, against the layer that its flags are read as.

What SGLang has compiled (quantization of activations, sorting, the activation function) stands here in torch.
"""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_core import quantize_moe_weights
from moe_core.reference.quantization import quantize_tensor
from moe_sglang.kinds import KINDS
from moe_sglang_layers import HIDDEN, ROWS, SIZE, E, config, dispatched, expected, info_of, row_name, runner
from torch import Tensor

ROWS_IN_A_TILE = 16


def aligned(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs in the order of their experts, each expert's padded to whole tiles; the tiles' experts; how many rows."""
    flat = ids.flatten()
    rows: list[int] = []
    experts: list[int] = []
    for expert in range(E):
        mine = (flat == expert).nonzero()[:, 0].tolist()
        mine += [flat.numel()] * (-len(mine) % ROWS_IN_A_TILE)
        rows += mine
        experts += [expert] * (len(mine) // ROWS_IN_A_TILE)
    return tuple(torch.tensor(values, dtype=torch.int32) for values in (rows, experts, [len(rows)]))  # type: ignore[return-value]


@pytest.fixture
def kernels(sglang: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of SGLang's kernel, with quantizers in torch."""
    from moe_core import kFp8Dynamic128Sym, kFp8DynamicTensorSym, kFp8DynamicTokenSym, kInt8DynamicTokenSym
    from sglang.kernels.ops.moe import fused_moe_triton_kernels as module

    def fp8(x: Tensor, scale: Tensor | None, use_per_token_if_dynamic: bool) -> tuple[Tensor, Tensor]:
        if scale is not None:
            return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale
        found = quantize_tensor(x, kFp8DynamicTokenSym if use_per_token_if_dynamic else kFp8DynamicTensorSym)
        return found[0], found[1]

    monkeypatch.setattr(module, "scaled_fp8_quant", fp8)
    monkeypatch.setattr(module, "per_token_quant_int8", lambda x: quantize_tensor(x, kInt8DynamicTokenSym)[:2])
    monkeypatch.setattr(
        module,
        "per_token_group_quant_fp8",
        lambda x, group: quantize_tensor(x, kFp8Dynamic128Sym.with_group(1, group))[:2],
    )
    return module


def by_sglang(kernels: Any, info: Any, tokens: Any) -> Tensor:
    """The sum of the experts as SGLang's `_fused_moe_kernel_sequence` calls the kernel, in float32."""
    import triton.language as tl

    x, topk = tokens.hidden_states, tokens.topk_output
    count, top_k = topk.topk_ids.shape
    width = min(64, info.block_shape[1]) if info.block_shape is not None else 32
    tile = {"BLOCK_SIZE_M": ROWS_IN_A_TILE, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": width, "GROUP_SIZE_M": 1}
    flags = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant", "block_shape")
    named = {flag: getattr(info, flag) for flag in flags}
    order = aligned(topk.topk_ids)

    def gemm(a: Tensor, weight: str, rows: int, multiply: bool, slots: int) -> Tensor:
        out = torch.zeros(count * top_k, rows, dtype=x.dtype)
        kernels.invoke_fused_moe_kernel(
            a,
            getattr(info, f"{weight}_weight"),
            getattr(info, weight.replace("w", "b")),
            out if weight == "w13" else out.view(count, top_k, rows),
            getattr(info, weight.replace("w", "a") + "_scale"),
            getattr(info, f"{weight}_scale"),
            getattr(info, f"{weight}_zp"),
            topk.topk_weights,
            topk.topk_ids,
            *order,
            multiply,
            slots,
            dict(tile),
            compute_type=tl.float16,
            **named,
        )
        return out

    gate, up = gemm(x, "w13", 2 * SIZE, False, top_k).float().chunk(2, dim=1)
    h = (torch.nn.functional.silu(gate) * up).to(x.dtype)
    return gemm(h, "w2", HIDDEN, True, 1).float().view(count, top_k, HIDDEN).sum(1)


@pytest.mark.parametrize("case", ROWS, ids=row_name)
def test_flags_are_read_as_sglangs_kernel_does(
    sglang: types.SimpleNamespace, kernels: Any, case: tuple[tuple[str, str], bool]
) -> None:
    row, static = case
    kind = KINDS[row]
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(E, 2 * SIZE, HIDDEN, generator=generator) / HIDDEN**0.5
    w2 = torch.randn(E, HIDDEN, SIZE, generator=generator) / SIZE**0.5
    weights = quantize_moe_weights(w13, w2, gated=True, weight_key=kind.weight_key)
    if kind.weight_key.group_shape.is_per_tensor and weights.w13_scale is not None:
        weights = replace(weights, w13_scale=weights.w13_scale[:, :1].expand(E, 2).contiguous())
    scales = {f"{name}_input_scale": torch.full((E,), 4 / 448) for name in ("w13", "w2")} if static else {}
    weights = replace(weights, activation_key=kind.static if static else kind.activation_key, **scales)
    tokens = dispatched(sglang, 3, dtype=torch.float16)
    info = info_of(sglang, row, weights)
    found = by_sglang(kernels, info, tokens)
    own = expected(kind.scheme, config(dtype=torch.float16), weights, tokens).float()
    through = sglang.FusedOpPool.get_fused_func("none", "triton")(tokens, info, runner(sglang)).hidden_states
    assert torch.equal(through.float(), own)
    # SGLang rounds gemm1's result, h and each expert's output to 16 bits, and dequantized weights: some eight steps
    bound = 8 * 2**-11
    if kind.activation_key is not None:
        # such differences bring one in 2^6 values of h to the neighboring code, a step of 2^-3 of it apart
        bound += 2**-3 * 2**-3
    assert float((found - own).norm()) <= bound * float(own.norm())
