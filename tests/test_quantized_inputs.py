"""Experts that take hidden states quantized by somebody else compute what they compute from unquantized ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_core import DeviceInfo, FusedMoEConfig, kFp8Dynamic128Sym, registry
from moe_core.interface.claims import expand_key
from moe_core.interface.experts import FusedMoEExperts, FusedMoEExpertsModular
from moe_core.kernels.experts.grouped import GroupedExperts
from moe_core.kernels.gemm.tiles.launch import Routing
from moe_core.kernels.gemm.tiles.quantize_rows import quantize_rows
from moe_core.kernels.gemm.workspaces import order_workspaces
from moe_core.kernels.launch.launch import record
from moe_core.kernels.ops.quantize import quantize_activation
from moe_core.kernels.ops.sort import QuantizeRows, sort_pairs
from moe_core.parallel.prepare_finalize.token_rows import Tokens
from moe_core.spec.device import as_torch_device
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.workspace import Workspace
from moe_core.testing.data import make_weights
from moe_core.testing.meta_layers import meta_layer_weights

CONFIG = FusedMoEConfig(num_experts=4, top_k=2, hidden_size=256, intermediate_size=128)
H200 = DeviceInfo.parse("h200")


def takers() -> list[tuple[type[FusedMoEExperts], QuantKey, QuantKey]]:
    """(class, weight key, activation key) of every pair that may come quantized, once for each activation key."""
    found = {}
    for oracle in registry().oracles():
        for backend in oracle.table():
            for experts in backend.load():
                if not experts.claims.takes_quantized:
                    continue
                for w, a in experts.claims.keys:
                    weight_key, key = expand_key(w)[0], expand_key(a)[0]
                    if weight_key is not None and key is not None and key.is_token_wise:
                        found.setdefault((experts, key), (experts, weight_key, key))
    return list(found.values())


def name_of(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


@pytest.mark.parametrize(("experts", "weight_key", "key"), takers(), ids=name_of)
def test_codes_from_outside_give_the_same_bits(
    experts: type[FusedMoEExpertsModular], weight_key: QuantKey, key: QuantKey
) -> None:
    device = as_torch_device()
    made = experts(CONFIG, weight_key=weight_key, activation_key=key, device=DeviceInfo.current(device))
    assert made.takes_quantized
    weights = made.convert(make_weights(CONFIG, weight_key, key, seed=1).to(device))
    generator = torch.Generator().manual_seed(3)
    for tokens in (1, 5, 70):
        x = torch.randn(tokens, CONFIG.hidden_size, generator=generator).to(torch.bfloat16)
        x[0, 7] = 300.0
        topk_weights, topk_ids = torch.rand(tokens, CONFIG.num_experts, generator=generator).topk(CONFIG.top_k)
        topk_ids[0, 0] = -1
        given = [tensor.to(device) for tensor in (topk_weights, topk_ids.int())]
        x = x.to(device)
        # as they arrive from other ranks: rows of bytes, in which the codes of tokens lie apart
        codes, scale = quantize_activation(x, key)
        left = Tokens(codes, scale, *given)
        came = left.unpack(left.pack())
        assert came.hidden_states.stride(0) > CONFIG.hidden_size
        outputs = [torch.full_like(x, float("nan")) for _ in range(2)]
        for output, hidden, scales in zip(outputs, (x, came.hidden_states), (None, came.scale), strict=True):
            made.apply(
                output,
                hidden,
                weights,
                topk_weights=given[0],
                topk_ids=given[1],
                workspace=Workspace(device).take(made.workspaces(tokens)),
                hidden_states_scale=scales,
            )
        assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("experts", "weight_key", "key"), [case for case in takers() if issubclass(case[0], GroupedExperts)], ids=name_of
)
def test_codes_are_not_quantized_again(experts: type[GroupedExperts], weight_key: QuantKey, key: QuantKey) -> None:
    """Launches for an H200, where the warp-specialized kernel wants the codes in the sorted order."""
    config = FusedMoEConfig(num_experts=32, top_k=6, hidden_size=2048, intermediate_size=768)
    made = experts(config, weight_key=weight_key, activation_key=key, device=H200)
    weights = meta_layer_weights(made)
    columns = 1 if key.group_shape.is_per_row else config.hidden_size // key.group_size
    for tokens in (1, 64, 4096):
        routing = torch.empty(tokens, config.top_k, device="meta")
        x = torch.empty(
            tokens, config.hidden_size, dtype=torch.int8 if "int8" in str(key) else torch.float8_e4m3fn, device="meta"
        )
        scale = torch.empty(tokens, columns, dtype=key.scale.dtype, device="meta")
        with record() as launches:
            made.apply(
                torch.empty(tokens, config.hidden_size, dtype=config.dtype, device="meta"),
                x,
                weights,
                topk_weights=routing,
                topk_ids=routing.int(),
                workspace=Workspace("meta").take(made.workspaces(tokens)),
                hidden_states_scale=scale,
            )
        scattered = [one for one in launches if one.name == "quantize_rows_kernel"]
        scattered = [one for one in scattered if one.arguments["positions"] is not None]
        assert all(one.arguments["x_scales"] is scale for one in scattered)
        assert bool(scattered) == (tokens == 4096)
        # what sorts gets no rows to quantize
        assert all(one.arguments["rows"].quantize is None for one in launches if one.name == "sort_kernel")


def test_codes_change_places_with_their_scales() -> None:
    """Into the sorted order: what runs before the warp-specialized kernel, which no interpreter knows."""
    device = as_torch_device()
    tokens, top_k, experts, columns = 9, 2, 4, 256
    generator = torch.Generator().manual_seed(2)
    codes, scale = quantize_activation(torch.randn(tokens, columns, generator=generator), kFp8Dynamic128Sym)
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator).int()
    codes, scale, ids = codes.to(device), scale.to(device), ids.to(device)
    workspace = Workspace(device).take(order_workspaces(tokens * top_k, tokens, experts, False))
    pairs = sort_pairs(ids, experts, 16, workspace=workspace, positions=True)
    values = torch.zeros(tokens * top_k, columns, dtype=codes.dtype, device=device)
    scales = torch.zeros(tokens * top_k, columns // 128, device=device)
    job = QuantizeRows(codes, values, scales, None, 128)
    routing = Routing(ids, torch.ones(tokens, top_k, device=device), experts, None, False)
    quantize_rows(job, routing.in_use, positions=pairs.positions, x_scale=scale, pdl=False)
    chosen = ids.flatten().tolist()
    order = [pair for expert in range(experts) for pair, one in enumerate(chosen) if one == expert]
    rows = torch.tensor(order, device=device) // top_k
    assert torch.equal(values[: len(order)].view(torch.uint8), codes[rows].view(torch.uint8))
    assert torch.equal(scales[: len(order)], scale[rows])
