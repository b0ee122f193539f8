"""Batch-invariant layers: the same products for every number of tokens, and results that are the same bits."""

from __future__ import annotations

from typing import Any

import moe_core as mc
import pytest
import torch
from moe_core.kernels.experts.grouped import GroupedExperts
from moe_core.kernels.launch.launch import Launch
from moe_core.runtime.call_launches import call_launches
from moe_core_layers import Kind, some_kinds
from moe_core_meta_layers import experts_cases, keys_on_h200, layer_of, on_h200

#: from one to hundreds of rows for each expert
TOKENS = (1, 2, 8, 40, 100, 300, 1000, 5000)


def product(launch: Launch) -> tuple[Any, ...]:
    """What a product's bits depend on, beside what is free: see `moe_core.kernels.gemm.heuristics.invariant`."""
    given = launch.arguments
    functions = [getattr(given["functions"], name) for name in ("open_b", "load_b", "multiply", "scale_acc")]
    names = tuple(None if function is None else function.fn.__qualname__ for function in functions)
    return given["BLOCK_K"], given["SPLIT_K"], names


@pytest.mark.parametrize(
    ("experts", "lora"), experts_cases(batch_invariant=True), ids=lambda value: getattr(value, "__name__", str(value))
)
def test_every_number_of_tokens_has_the_same_products(experts: type[GroupedExperts], lora: bool) -> None:
    config = layer_of(experts, batch_invariant=True, is_lora_enabled=lora)
    for keys in keys_on_h200(experts, config)[:3]:
        kernel = on_h200(experts, config, keys)
        products: dict[bool, set[tuple[Any, ...]]] = {}
        heights = set()
        launches = [launch for tokens in TOKENS for launch in call_launches(kernel, tokens)]
        for launch in launches:
            assert launch.name not in ("gemv_kernel", "split_k_reduce_kernel")
            # it sums e4m3 in the tensor cores, and only scales of blocks keep it from that
            assert launch.name != "hopper_kernel" or keys[0].group_size != -1 or keys[0].dtype.kind.name == "INT"
            if launch.name != "grouped_gemm_kernel":
                continue
            if launch.arguments["functions"].multiply.fn.__module__ == "moe_core.kernels.gemm.tiles.lora":
                heights.add(launch.arguments["BLOCK_M"])
            else:
                products.setdefault(launch.arguments["epilogue"].activation.value == "", set()).add(product(launch))
        assert {key: len(found) for key, found in products.items()} == {False: 1, True: 1}
        assert len(heights) == lora


@pytest.mark.parametrize("kind", some_kinds(), ids=str)
def test_a_layer_with_a_router_gives_a_token_the_same_bits_among_others(kind: Kind) -> None:
    config = kind.config(batch_invariant=True)
    layer = mc.FusedMoELayer.from_weights(
        kind.scheme, config, kind.weights(config), router_weight=torch.randn(6, config.hidden_size), copy=True
    )
    x = torch.randn(7, config.hidden_size).to(config.dtype)
    together = layer(x)
    for token in range(7):
        assert torch.equal(layer(x[token : token + 1]), together[token : token + 1])
    assert torch.equal(layer(x.flip(0)), together.flip(0))


def test_a_scale_that_tokens_share_is_refused() -> None:
    shared = mc.kFp8DynamicTensorSym
    config = mc.FusedMoEConfig(8, 2, 256, 128, batch_invariant=True)
    with pytest.raises(mc.NoBackendError, match="batch invariant"):
        mc.oracle("fp8").select(config, weight_key=mc.kFp8StaticTensorSym, activation_key=shared, device="cpu")
