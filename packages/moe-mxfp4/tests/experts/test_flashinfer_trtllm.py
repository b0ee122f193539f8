"""FlashInfer's MXFP4 kernels on sm_100: what they are told, and their adapter around a double; no library needed.

The double computes what FlashInfer documents, from the bytes that it would get.  That the calls fit the installed
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
    RoutingConfig,
    RoutingMethodType,
    SelectionError,
    kFp8DynamicTokenSym,
    kMxfp4Static,
    kMxfp8Dynamic,
)
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.reference.quantization import fake_quantize
from moe_core.reference.tolerance import expected_output
from moe_core.spec.device import DeviceInfo
from moe_core.spec.numerics import E2M1_VALUES, e8m0_to_float32
from moe_core.testing import ConformanceTests
from moe_core.testing.data import make_inputs, make_weights
from moe_kit.trtllm_double import (
    BLACKWELL,
    activation_parameters,
    check_ids,
    check_ranks,
    doubled,
    gated,
    given_routing,
    kernel_routing,
    unshuffled,
    untiled,
)
from moe_mxfp4 import Mxfp4MoeBackend, mxfp4_round_up_hidden_size_and_intermediate_size, select_mxfp4_moe_backend
from moe_mxfp4.experts.flashinfer_trtllm import LAYOUT_LINEAR, TrtLlmMxfp4ExpertsModular, TrtLlmMxfp4ExpertsMonolithic

INSTALLED = Environment({"flashinfer-python": "0.7.2.post1", "triton": "3.6.0"})
RENORMALIZE = RoutingConfig.from_method(RoutingMethodType.Renormalize)
#: K and N both padded: to 256 and to 128
LAYER = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=160, intermediate_size=96, routing=RENORMALIZE)
OAI = replace(LAYER, activation=MoEActivation.SWIGLUOAI, has_bias=True)
on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton does not interpret where there is a GPU")


# ------------------------------------------------------------------- double


def codes(packed):
    """e2m1 numbers of bytes, the low four bits first, as float32."""
    codes = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
    return torch.tensor(E2M1_VALUES)[codes.long()]


def matrix(call, name, expert):
    """One expert's matrix [rows, K] float32 from the library's layout, its rows as they were before the shuffle."""
    scale = untiled(call[f"{name}_weights_scale"][expert].view(torch.uint8))
    return unshuffled(codes(call[f"{name}_weights"][expert]) * e8m0_to_float32(scale).repeat_interleave(32, 1))


def check_call(call, ids):
    x, output, size = call["hidden_states"], call["output"], call["intermediate_size"]
    local, hidden = call["local_num_experts"], x.shape[1]
    assert x.is_contiguous()
    assert output.is_contiguous()
    assert output.dtype is torch.bfloat16
    assert x.data_ptr() % 16 == output.data_ptr() % 16 == 0
    assert hidden % 256 == size % 128 == 0
    # the last kernel writes 16 bytes at a time, and as many columns as the output has
    assert output.shape[1] <= hidden
    assert output.shape[1] % 8 == 0
    assert call["activation_type"] == 3
    check_ids(call, ids)
    for name, rows, columns in (("gemm1", 2 * size, hidden), ("gemm2", hidden, size)):
        assert call[f"{name}_weights"].shape == (local, rows, columns // 2)
        assert call[f"{name}_weights"].dtype is torch.uint8
        assert call[f"{name}_weights_scale"].shape == (local, rows, columns // 32)
        assert call[f"{name}_weights_scale"].dtype is torch.float8_e4m3fn
        bias = call[f"{name}_bias"]
        assert bias is None or (bias.shape == (local, rows) and bias.dtype is torch.float32)
        for tensor in (call[f"{name}_weights"], call[f"{name}_weights_scale"], bias):
            assert tensor is None or tensor.is_contiguous()
    for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"):
        assert call[name] is None or (call[name].shape == (local,) and call[name].dtype is torch.float32)
    assert call["output1_scale_scalar"] is call["output1_scale_gate_scalar"] is call["output2_scale_scalar"] is None


def computed(call, ids, weights):
    """The layer's output; experts that live elsewhere count nothing."""
    check_call(call, ids)
    scale, output = call["hidden_states_scale"], call["output"]
    x = call["hidden_states"].float()
    if scale is None:
        assert call["hidden_states"].dtype is torch.bfloat16
    else:
        assert call["hidden_states_scale_layout"] == LAYOUT_LINEAR
        assert call["hidden_states"].dtype is scale.dtype is torch.float8_e4m3fn
        assert scale.shape == (len(x), x.shape[1] // 32)
        x = x * e8m0_to_float32(scale.view(torch.uint8)).repeat_interleave(32, 1)
    total = torch.zeros(output.shape)
    for expert in range(call["local_num_experts"]):
        token, slot = (ids == expert + call["local_expert_offset"]).nonzero(as_tuple=True)
        if not len(token):
            continue
        biases = [
            0.0 if bias is None else unshuffled(bias[expert]) for bias in (call["gemm1_bias"], call["gemm2_bias"])
        ]
        z = x[token] @ matrix(call, "gemm1", expert).t() + biases[0]
        h = gated(z[:, 0::2], z[:, 1::2], *activation_parameters(call, expert))
        h = h.bfloat16().float() if scale is None else fake_quantize(h, kMxfp8Dynamic)
        y = (h @ matrix(call, "gemm2", expert).t() + biases[1]).bfloat16().float()
        total.index_add_(0, token, y[:, : output.shape[1]] * weights[token, slot, None])
    output.copy_(total)


def routing(**call):
    ids, weights = kernel_routing(call)
    computed(call, ids, weights.bfloat16().float())


def routed(**call):
    ids, weights = given_routing(call)
    assert weights.dtype is torch.float32
    computed(call, ids, weights)


LIBRARY = SimpleNamespace(trtllm_fp4_block_scale_moe=routing, trtllm_fp4_block_scale_routed_moe=routed)
Double = doubled(TrtLlmMxfp4ExpertsMonolithic, LIBRARY, max_experts=TrtLlmMxfp4ExpertsMonolithic.claims.max_experts)
ModularDouble = doubled(TrtLlmMxfp4ExpertsModular, LIBRARY)


class TestMonolithic(ConformanceTests):
    experts = Double
    device = "cpu"


class TestModular(ConformanceTests):
    experts = ModularDouble
    device = "cpu"


def made(config, weights=None, experts=Double, activation_key=None):
    """The experts of ``config``, and converted weights."""
    instance = experts(config, weight_key=kMxfp4Static, activation_key=activation_key, device=BLACKWELL)
    return instance, instance.convert(weights or make_weights(config, kMxfp4Static, activation_key, seed=0))


# ---------------------------------------------------------------- arguments


def arguments(config, tokens=3):
    instance, weights = made(config)
    x = torch.randn(tokens, config.hidden_size, dtype=torch.bfloat16)
    logits = torch.randn(tokens, config.num_experts)
    inputs = {"hidden_states": x, "hidden_states_scale": None}
    return instance.arguments(torch.empty_like(x), inputs, weights, instance.routing_arguments(logits, None))


def test_alpha_beta_and_limit_are_the_config_s():
    plain = arguments(LAYER)
    assert plain["gemm1_alpha"] is plain["gemm1_beta"] is plain["gemm1_clamp_limit"] is None
    clamped = arguments(replace(LAYER, activation_params=ActivationParams(limit=0.75)))
    assert clamped["gemm1_alpha"] is clamped["gemm1_beta"] is None
    assert clamped["gemm1_clamp_limit"].tolist() == [0.75] * 8
    for params, expected in (
        (None, [1.702, 1.0, 7.0]),
        (ActivationParams(alpha=1.25, beta=0.5, limit=3.0), [1.25, 0.5, 3.0]),
    ):
        given = arguments(replace(OAI, activation_params=params))
        found = [given[name] for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")]
        assert [tensor.unique().tolist() for tensor in found] == [[pytest.approx(value)] for value in expected]


@pytest.mark.parametrize(
    "method",
    [
        RoutingMethodType.Renormalize,
        RoutingMethodType.RenormalizeNaive,
        RoutingMethodType.SigmoidRenorm,
        RoutingMethodType.Sigmoid,
        RoutingMethodType.MiniMax2,
    ],
)
def test_the_routing_method_is_the_config_s(method):
    given = arguments(replace(LAYER, routing=RoutingConfig.from_method(method, routed_scaling_factor=2.5)))
    assert given["routing_method_type"] == int(method)
    assert given["routed_scaling_factor"] == (2.5 if method is RoutingMethodType.MiniMax2 else None)
    assert given["n_group"] is given["topk_group"] is None


def test_groups_and_the_scaling_factor_reach_the_library():
    grouped = RoutingConfig.from_method(
        RoutingMethodType.DeepSeekV3, num_expert_group=2, topk_group=1, routed_scaling_factor=2.5
    )
    given = arguments(replace(LAYER, routing=grouped))
    assert (given["n_group"], given["topk_group"], given["routed_scaling_factor"]) == (2, 1, 2.5)


def test_biases_become_float32_and_follow_their_rows():
    config = replace(OAI, intermediate_size=128, hidden_size=256)
    weights = make_weights(config, kMxfp4Static, None, seed=0)
    # of each row its own number, and a w13 whose rows say the same
    numbers = torch.arange(256).float()
    weights = replace(weights, w13_bias=numbers.expand(8, 256), w2_bias=numbers.expand(8, 256))
    _, converted = made(config, weights)
    first, second = converted.quant_config.w1_bias, converted.quant_config.w2_bias
    assert first.dtype is second.dtype is torch.float32
    turns = torch.stack((numbers[128:], numbers[:128]), 1).flatten()
    assert torch.equal(unshuffled(first[3]), turns)
    assert torch.equal(unshuffled(second[3]), numbers)


# ------------------------------------------------------------------ padding


def test_padding_is_zeros():
    _, converted = made(OAI)
    # 96 of 128 rows of gate and up, which come in turns; 160 of 256 columns
    rows = unshuffled(codes(converted.w13[0]))
    assert rows.shape == (256, 256)
    assert rows[: 2 * 96, :160].any(dim=1).all()
    assert not rows[2 * 96 :].any()
    assert not rows[:, 160:].any()
    columns = unshuffled(codes(converted.w2[0]))
    assert columns.shape == (256, 128)
    assert not columns[160:].any()
    assert not columns[:, 96:].any()
    assert not unshuffled(converted.quant_config.w1_bias[0])[2 * 96 :].any()
    assert not unshuffled(converted.quant_config.w2_bias[0])[160:].any()


@on_a_cpu
@pytest.mark.parametrize("activation_key", [None, kMxfp8Dynamic], ids=str)
@pytest.mark.parametrize(("hidden", "inter", "padded"), [(2880, 96, (3072, 128)), (64, 2880, (256, 2944))])
def test_padding_shows_neither_in_the_output_nor_in_its_shape(hidden, inter, padded, activation_key):
    # gpt-oss's size, once as K and once as N
    config = replace(OAI, num_experts=4, num_local_experts=4, hidden_size=hidden, intermediate_size=inter, routing=None)
    assert ModularDouble.padded_sizes(hidden, inter) == padded
    weights = make_weights(config, kMxfp4Static, activation_key, seed=0)
    instance, converted = made(config, weights, experts=ModularDouble, activation_key=activation_key)
    assert converted.w13.shape == (4, 2 * padded[1], padded[0] // 2)
    inputs = make_inputs(config, 2, seed=0)
    given = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    output = FusedMoEKernel(instance, converted, default_prepare_finalize(config)).apply(inputs.x, **given)
    assert output.shape == (2, hidden)
    expected_output(inputs.x, weights, config, truncates=activation_key is not None, **given).compare(output, "result")


def test_a_layer_of_whole_tiles_is_not_padded():
    assert Double.padded_sizes(512, 384) == (512, 384)
    sizes = mxfp4_round_up_hidden_size_and_intermediate_size(Mxfp4MoeBackend.FLASHINFER_TRTLLM, 2880, 2880)
    assert sizes == (3072, 2944)


def test_rows_and_addresses_that_the_library_cannot_read_are_copied():
    config = replace(LAYER, hidden_size=256)
    kernel = FusedMoEKernel(*made(config))
    logits, plain = torch.randn(3, 8), torch.randn(3, 256, dtype=torch.bfloat16)
    expected = kernel.apply_monolithic(plain, router_logits=logits)
    strided = torch.randn(3, 300, dtype=torch.bfloat16)[:, :256].copy_(plain)
    shifted = torch.empty(1 + 3 * 256, dtype=torch.bfloat16)[1:].view(3, 256).copy_(plain)
    output = torch.zeros(1 + 3 * 256, dtype=torch.bfloat16)[1:].view(3, 256)
    assert shifted.data_ptr() % 16
    for x in (strided, shifted):
        assert torch.equal(kernel.apply_monolithic(x, router_logits=logits, output=output), expected)


# ----------------------------------------------------------------- refusals


def reasons(config=LAYER, activation_key=None, device=BLACKWELL, experts=TrtLlmMxfp4ExpertsMonolithic):
    return "; ".join(experts.unsupported_reasons(config, kMxfp4Static, activation_key, device, environment=INSTALLED))


def test_only_what_the_kernel_reads_is_taken():
    assert reasons() == reasons(activation_key=kMxfp8Dynamic) == reasons(OAI) == ""
    assert "does not take activations quantized as kFp8DynamicTokenSym" in reasons(activation_key=kFp8DynamicTokenSym)
    assert "needs sm100 to sm109" in reasons(device=DeviceInfo.parse("sm90"))
    assert "needs sm100 to sm109" in reasons(device=DeviceInfo.parse("sm120"))
    assert "multiple of 32, got 80" in reasons(replace(LAYER, intermediate_size=80))
    assert "does not compute the activation relu2_no_mul" in reasons(replace(LAYER, activation="relu2_no_mul"))
    assert "hidden states in float16, takes bfloat16" in reasons(replace(LAYER, dtype=torch.float16))
    assert "is monolithic (it routes itself), but the config has no routing" in reasons(replace(LAYER, routing=None))
    assert reasons(replace(OAI, routing=None), experts=TrtLlmMxfp4ExpertsModular) == ""
    unknown = replace(LAYER, routing=RoutingConfig.from_method(RoutingMethodType.Default))
    assert "does not compute the routing method Default" in reasons(unknown)


def test_ranks_add_up_to_the_whole_layer_and_other_maps_are_no_silent_error():
    check_ranks(Double, OAI, make_weights(OAI, kMxfp4Static, None, seed=0))


@on_a_cpu
def test_router_weights_that_are_huge_reach_the_result_in_float32():
    config = replace(OAI, routing=None)
    instance, converted = made(config, experts=ModularDouble)
    kernel = FusedMoEKernel(instance, converted, default_prepare_finalize(config))
    inputs = make_inputs(config, 3, seed=0)
    given = {"topk_ids": inputs.topk_ids.to(torch.int32)}
    once = kernel.apply(inputs.x, topk_weights=inputs.topk_weights, **given)
    large = kernel.apply(inputs.x, topk_weights=inputs.topk_weights * 2.0**100, **given)
    assert torch.equal(large.double(), once.double() * 2.0**100)


def test_the_class_fits_the_routing():
    def chosen(config, device="sm100"):
        return select_mxfp4_moe_backend(
            config, moe_backend=Mxfp4MoeBackend.FLASHINFER_TRTLLM, device=device, environment=INSTALLED
        )

    assert chosen(LAYER).experts is TrtLlmMxfp4ExpertsMonolithic
    assert chosen(replace(LAYER, routing=None)).experts is TrtLlmMxfp4ExpertsModular
    with pytest.raises(SelectionError, match="sm100"):
        chosen(LAYER, "sm90")
