"""FlashInfer's MXINT4 kernel: what it is told, and its adapter around a double; no library and no GPU needed.

The double computes what FlashInfer documents, from the bytes that it would get.  That the call fits the installed
library, and the layouts its helpers, is tested in tests/libraries.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from moe_core import (
    ActivationParams,
    Environment,
    FusedMoEConfig,
    FusedMoEKernel,
    MoEActivation,
    Oracle,
    RoutingConfig,
    RoutingMethodType,
    SelectionError,
    kInt4Static,
    kInt4Static32,
    kInt4Static32Asym,
)
from moe_core.spec.device import DeviceInfo
from moe_core.testing import ConformanceTests
from moe_core.testing.data import make_weights
from moe_kit.trtllm_double import (
    BLACKWELL,
    activation_parameters,
    check_ids,
    check_ranks,
    doubled,
    gated,
    kernel_routing,
    unshuffled,
    untiled,
)
from moe_wna16 import WNA16MoEBackend
from moe_wna16.experts.flashinfer_trtllm import (
    TrtLlmMxint4ExpertsModular,
    TrtLlmMxint4ExpertsMonolithic,
    pack_routing,
)
from moe_wna16.scheme import SCHEME

INSTALLED = Environment({"flashinfer-python": "0.7.2.post1"})
RENORMALIZE = RoutingConfig.from_method(RoutingMethodType.Renormalize)
LAYER = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=256, intermediate_size=96, routing=RENORMALIZE)


# ------------------------------------------------------------------- double


def signed_values(packed):
    """Two's complement 4-bit codes, the low one first, as float32."""
    codes = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1).int()
    return torch.where(codes >= 8, codes - 16, codes).float()


def matrix(weights, scale, expert):
    """One expert's matrix [rows, K] float32 from the library's layout, its rows as they were before the shuffle."""
    rows = weights[expert].transpose(0, 1).flatten(1)
    wide = untiled(scale[expert]).float().repeat_interleave(32, 1)
    return unshuffled(signed_values(rows) * wide)


def computed(call, ids, weights):
    """The layer's output; experts that live elsewhere count nothing."""
    x, output, size = call["hidden_states"], call["output"], call["intermediate_size"]
    local, hidden = call["local_num_experts"], x.shape[1]
    assert x.dtype is output.dtype is torch.bfloat16
    assert x.is_contiguous()
    assert output.is_contiguous()
    assert x.data_ptr() % 16 == output.data_ptr() % 16 == 0
    assert hidden % 256 == size % 256 == 0
    check_ids(call, ids)
    assert call["gemm1_weights"].shape == (local, hidden // 256, 2 * size, 128)
    assert call["gemm2_weights"].shape == (local, size // 256, hidden, 128)
    assert call["gemm1_weights_scale"].numel() == local * 2 * size * hidden // 32
    assert call["gemm2_weights_scale"].numel() == local * size * hidden // 32
    for name in ("gemm1_weights", "gemm2_weights"):
        assert call[name].dtype is torch.uint8
        assert call[f"{name}_scale"].dtype is torch.bfloat16
        assert call[name].is_contiguous()
        assert call[f"{name}_scale"].is_contiguous()
    total = torch.zeros(output.shape)
    for expert in range(local):
        token, slot = (ids == expert + call["local_expert_offset"]).nonzero(as_tuple=True)
        if not len(token):
            continue
        w13 = matrix(call["gemm1_weights"], call["gemm1_weights_scale"], expert)
        w2 = matrix(call["gemm2_weights"], call["gemm2_weights_scale"], expert)
        z = x[token].float() @ w13.bfloat16().float().t()
        h = gated(z[:, 0::2], z[:, 1::2], *activation_parameters(call, expert)).bfloat16().float()
        y = (h @ w2.bfloat16().float().t()).bfloat16().float()
        total.index_add_(0, token, y * weights[token, slot, None])
    output.copy_(total)


def routing(**call):
    ids, weights = kernel_routing(call)
    computed(call, ids, weights.bfloat16().float())


def routed(**call):
    packed = call["topk_ids"]
    assert packed.dtype is torch.int32
    assert call["n_group"] is call["topk_group"] is call["routed_scaling_factor"] is None
    computed(call, packed >> 16, packed.to(torch.int16).view(torch.bfloat16).float())


LIBRARY = SimpleNamespace(trtllm_mxint4_block_scale_moe=routing, trtllm_mxint4_block_scale_routed_moe=routed)
Double = doubled(TrtLlmMxint4ExpertsMonolithic, LIBRARY, max_experts=TrtLlmMxint4ExpertsMonolithic.claims.max_experts)
ModularDouble = doubled(TrtLlmMxint4ExpertsModular, LIBRARY)


class TestMonolithic(ConformanceTests):
    experts = Double
    device = "cpu"


class TestModular(ConformanceTests):
    experts = ModularDouble
    device = "cpu"


def made(config, weights=None, experts=Double):
    """The experts of ``config``, and converted weights."""
    instance = experts(config, weight_key=kInt4Static32, activation_key=None, device=BLACKWELL)
    return instance, instance.convert(weights or make_weights(config, kInt4Static32, None, seed=0))


# ---------------------------------------------------------------- arguments


def arguments(config, tokens=3):
    instance, weights = made(config)
    x = torch.randn(tokens, config.hidden_size, dtype=torch.bfloat16)
    logits = torch.randn(tokens, config.num_experts)
    routing = instance.routing_arguments(logits, None)
    return instance.arguments(torch.empty_like(x), {"hidden_states": x}, weights, routing)


def test_parameters_of_the_activation_reach_the_library():
    plain = arguments(LAYER)
    assert plain["gemm1_alpha"] is plain["gemm1_beta"] is plain["gemm1_clamp_limit"] is None
    clamped = arguments(replace(LAYER, activation_params=ActivationParams(limit=0.75)))
    assert clamped["gemm1_alpha"] is clamped["gemm1_beta"] is None
    assert clamped["gemm1_clamp_limit"].tolist() == [0.75] * 8
    oai = arguments(replace(LAYER, activation=MoEActivation.SWIGLUOAI))
    given = [oai[name] for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")]
    assert all(tensor.dtype is torch.float32 for tensor in given)
    assert [tensor.unique().tolist() for tensor in given] == [[pytest.approx(1.702)], [1.0], [7.0]]
    own = ActivationParams(alpha=1.25, beta=0.5, limit=3.0)
    other = arguments(replace(LAYER, activation=MoEActivation.SWIGLUOAI, activation_params=own))
    given = [other[name] for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")]
    assert [tensor.unique().tolist() for tensor in given] == [[1.25], [0.5], [3.0]]


def test_the_routed_scaling_factor_reaches_the_result_whoever_applies_it():
    deep = {"num_expert_group": 2, "topk_group": 1}
    for method, groups, told in (
        (RoutingMethodType.DeepSeekV3, deep, 2.5),
        (RoutingMethodType.MiniMax2, {}, 2.5),
        (RoutingMethodType.Renormalize, {}, None),
    ):
        scaled = RoutingConfig.from_method(method, routed_scaling_factor=2.5, **groups)
        assert arguments(replace(LAYER, routing=scaled))["routed_scaling_factor"] == told
    logits, x = torch.randn(3, 8), torch.randn(3, 256, dtype=torch.bfloat16)
    results = []
    for factor in (1.0, 4.0):
        routing = RoutingConfig.from_method(RoutingMethodType.Renormalize, routed_scaling_factor=factor)
        kernel = FusedMoEKernel(*made(replace(LAYER, routing=routing)))
        results.append(kernel.apply_monolithic(x, router_logits=logits))
    assert torch.equal(results[0] * 4, results[1])


def test_ungrouped_routing_has_no_groups():
    given = arguments(LAYER)
    assert given["n_group"] is given["topk_group"] is None
    assert given["routing_method_type"] == int(RoutingMethodType.Renormalize)


def test_offset_binary_codes_become_signed_ones():
    config = replace(LAYER, intermediate_size=256)
    weights = make_weights(config, kInt4Static32, None, seed=0)
    codes = torch.arange(16, dtype=torch.uint8).repeat(8)  # of one row: 256 columns in 128 bytes
    w2 = weights.w2.clone()
    w2[1, 37] = codes | (15 - codes) << 4
    _, converted = made(config, replace(weights, w2=w2))
    row = unshuffled(signed_values(converted.w2[1].transpose(0, 1).flatten(1)))[37]
    expected = torch.stack((codes, 15 - codes), dim=1).flatten().float() - 8
    assert torch.equal(row, expected)


def test_a_routing_is_packed_as_the_library_documents():
    ids = torch.tensor([[0, 3], [511, 12]], dtype=torch.int32)
    weights = torch.tensor([[0.25, 1.0], [0.3, -2.0]])
    packed = pack_routing(ids.clone(), weights)
    assert torch.equal(packed >> 16, ids)
    assert torch.equal(packed.to(torch.int16).view(torch.bfloat16), weights.bfloat16())
    assert packed.dtype is torch.int32


def test_layers_with_parameters_of_the_activation_are_left_to_the_kernel_that_routes():
    def against(**changes):
        config = replace(LAYER, **changes)
        given = Environment({"flashinfer-python": "0.7.2.post1", "triton": "3.6.0"})
        return "; ".join(
            TrtLlmMxint4ExpertsModular.unsupported_reasons(config, kInt4Static32, None, BLACKWELL, environment=given)
        )

    assert against() == against(routing=None) == ""
    assert against(activation=MoEActivation.SWIGLUOAI) == "does not compute the activation swigluoai"
    assert "does not clamp" in against(activation_params=ActivationParams(limit=0.75))


def test_padding_is_zeros_and_never_shows():
    _, converted = made(LAYER)
    # 96 of 256 rows of gate and up, which come in turns
    rows = unshuffled(signed_values(converted.w13[0].transpose(0, 1).flatten(1)))
    assert not rows[2 * 96 :].any()
    assert rows[: 2 * 96].any(dim=1).all()
    columns = unshuffled(signed_values(converted.w2[0].transpose(0, 1).flatten(1)))
    assert not columns[:, 96:].any()


def test_rows_and_addresses_that_the_library_cannot_read_are_copied():
    kernel = FusedMoEKernel(*made(LAYER))
    logits = torch.randn(3, 8)
    plain = torch.randn(3, 256, dtype=torch.bfloat16)
    expected = kernel.apply_monolithic(plain, router_logits=logits)
    apart = torch.randn(3, 300, dtype=torch.bfloat16)[:, :256].copy_(plain)
    shifted = torch.empty(1 + 3 * 256, dtype=torch.bfloat16)[1:].view(3, 256).copy_(plain)
    output = torch.zeros(1 + 3 * 256, dtype=torch.bfloat16)[1:].view(3, 256)
    assert shifted.data_ptr() % 16
    for x in (apart, shifted):
        assert torch.equal(kernel.apply_monolithic(x, router_logits=logits, output=output), expected)


# ----------------------------------------------------------------- refusals


def reasons(config=LAYER, key=kInt4Static32, device=BLACKWELL):
    return "; ".join(
        TrtLlmMxint4ExpertsMonolithic.unsupported_reasons(config, key, None, device, environment=INSTALLED)
    )


def test_only_what_the_kernel_reads_is_taken():
    assert reasons() == ""
    for key in (
        kInt4Static,
        kInt4Static32Asym,
        kInt4Static32.with_scale_dtype(torch.float16),
        replace(kInt4Static32, permuted=True),
    ):
        assert "does not read weights quantized as" in reasons(key=key)
    assert "needs sm100 to sm109" in reasons(device=DeviceInfo.parse("sm90"))
    assert "multiple of 32, got 80" in reasons(replace(LAYER, intermediate_size=80))
    assert "multiple of 256, got 384" in reasons(replace(LAYER, hidden_size=384))
    assert "does not add biases" in reasons(replace(LAYER, has_bias=True))
    assert "hidden states in float16, takes bfloat16" in reasons(replace(LAYER, dtype=torch.float16))
    assert "is monolithic (it routes itself), but the config has no routing" in reasons(replace(LAYER, routing=None))
    assert "multiple of 4 experts, got 6" in reasons(replace(LAYER, num_experts=6, num_local_experts=6))


def test_ranks_add_up_to_the_whole_layer_and_other_maps_are_no_silent_error():
    check_ranks(Double, LAYER, make_weights(LAYER, kInt4Static32, None, seed=0))


def test_the_oracle_takes_the_class_that_fits_the_routing():
    environment = Environment({"flashinfer-python": "0.7.2.post1", "triton": "3.6.0"})

    def chosen(config, device="sm100"):
        selection = Oracle(SCHEME).select(
            config,
            weight_key=kInt4Static32,
            activation_key=None,
            device=device,
            environment=environment,
            moe_backend=WNA16MoEBackend.FLASHINFER_TRTLLM,
        )
        return selection.experts

    assert chosen(LAYER) is TrtLlmMxint4ExpertsMonolithic
    assert chosen(replace(LAYER, routing=None)) is TrtLlmMxint4ExpertsModular
    with pytest.raises(SelectionError, match="sm100"):
        chosen(LAYER, "sm90")
