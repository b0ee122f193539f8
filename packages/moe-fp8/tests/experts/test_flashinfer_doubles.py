"""FlashInfer's adapters around doubles that compute what FlashInfer documents, from the bytes that it would get.

Conversion, arguments and ids are those of a real call; only the kernels are not.  That the calls fit the installed
library, and the orders of rows its helpers, is tested in tests/libraries.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from moe_core import (
    TRITON,
    ActivationParams,
    FusedMoEConfig,
    FusedMoEKernel,
    MoEActivation,
    kFp8Dynamic128Sym,
    kMxfp8Dynamic,
)
from moe_core.activation import apply_moe_activation
from moe_core.config import FusedMoEParallelConfig
from moe_core.device import DeviceInfo
from moe_core.numerics import e8m0_to_float32
from moe_core.oracle import default_prepare_finalize
from moe_core.quantization import fake_quantize
from moe_core.routing import RoutingConfig, RoutingMethodType, route
from moe_core.testing import ConformanceTests
from moe_core.testing.data import make_inputs, make_weights
from moe_fp8.experts import flashinfer_cutlass, flashinfer_trtllm_modular, flashinfer_trtllm_monolithic

E4M3 = torch.float8_e4m3fn
CUTLASS_NAMES = {
    0: MoEActivation.GELU_NO_MUL,
    2: MoEActivation.SILU_NO_MUL,
    3: MoEActivation.SILU,
    4: MoEActivation.GELU,
    6: MoEActivation.RELU2_NO_MUL,
    7: MoEActivation.SWIGLUSTEP,
    8: MoEActivation.GELU_TANH,
}


on_a_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton does not interpret here; tests of the library itself run on a GPU"
)


def activate(kind, first, second, alpha=None, beta=None, limit=None):
    """``first`` and ``second`` as the library names them: up (linear) and gate; ``second`` None without a gate."""
    activation = CUTLASS_NAMES[kind]
    if second is None:
        return apply_moe_activation(activation, first)
    if alpha is not None or beta is not None:
        params = ActivationParams(alpha=alpha, beta=0.0 if beta is None else beta, limit=limit)
        return apply_moe_activation(MoEActivation.SWIGLUOAI, torch.cat((second, first), 1), params)
    params = None if limit is None else ActivationParams(limit=limit)
    return apply_moe_activation(activation, torch.cat((second, first), 1), params)


def one(tensor, expert):
    return None if tensor is None else float(tensor[expert])


def repeated(scale, rows, columns):
    """Block scales of one matrix for each of its elements."""
    grid = scale.repeat_interleave(rows // scale.shape[0], 0)
    return grid.repeat_interleave(columns // scale.shape[1], 1)


# ------------------------------------------------------------------ CUTLASS


def in_groups(x):
    """Quantised as the library does it: multiplied by 448 / amax, and by that one's reciprocal."""
    groups = x.unflatten(1, (-1, 128))
    amax = groups.abs().amax(dim=2, keepdim=True)
    scale = torch.where(amax > 0, 448.0 / amax, 1.0)
    return ((groups * scale).to(E4M3).float() * (1.0 / scale)).flatten(1)


def cutlass_fused_moe(
    *,
    input,
    token_selected_experts,
    token_final_scales,
    fc1_expert_weights,
    fc2_expert_weights,
    output_dtype,
    quant_scales,
    output,
    workspace_buffer,
    activation_type,
    use_fused_finalize,
    fc1_expert_biases=None,
    fc2_expert_biases=None,
    swiglu_alpha=None,
    swiglu_beta=None,
    swiglu_limit=None,
    use_deepseek_fp8_block_scale=False,
):
    assert token_selected_experts.dtype is torch.int32
    assert input.is_contiguous()
    assert input.data_ptr() % 16 == output.data_ptr() % 16 == 0
    assert output_dtype is torch.bfloat16
    assert not use_fused_finalize
    experts, hidden, inter = fc2_expert_weights.shape
    parts = fc1_expert_weights.shape[1] // inter
    total = torch.zeros(output.shape)
    for expert in range(experts):
        token, slot = (token_selected_experts == expert).nonzero(as_tuple=True)
        w13, w2 = fc1_expert_weights[expert].float(), fc2_expert_weights[expert].float()
        if use_deepseek_fp8_block_scale:
            assert input.dtype is torch.bfloat16
            w13 = w13 * repeated(quant_scales[0][expert], *w13.shape)
            w2 = w2 * repeated(quant_scales[1][expert], *w2.shape)
            z = in_groups(input[token].float()) @ w13.t()
        else:
            dequant_1, quant_2, dequant_2, x_scale = quant_scales
            assert x_scale.dim() == 0
            assert dequant_1.shape == quant_2.shape == dequant_2.shape == (experts,)
            assert input.dtype is E4M3
            z = input[token].float() @ w13.t() * dequant_1[expert]
        z = z.bfloat16().float()
        if fc1_expert_biases is not None:
            assert fc1_expert_biases.dtype is fc2_expert_biases.dtype is torch.bfloat16
            z = z + fc1_expert_biases[expert].float()
        first, second = (z[:, :inter], z[:, inter:]) if parts == 2 else (z, None)
        own = (one(swiglu_alpha, expert), one(swiglu_beta, expert), one(swiglu_limit, expert))
        h = activate(activation_type, first, second, *own)
        if use_deepseek_fp8_block_scale:
            y = in_groups(h.bfloat16().float()) @ w2.t()
        else:
            y = (h * quant_2[expert]).clamp(-448, 448).to(E4M3).float() @ w2.t() * dequant_2[expert]
        y = y.bfloat16().float()
        if fc2_expert_biases is not None:
            y = y + fc2_expert_biases[expert].float()
        total.index_add_(0, token, y * token_final_scales[token, slot, None])
    output.copy_(total)


class Cutlass:
    """The library of one process: for block scales all layers share a runner, which remembers its largest call."""

    def __init__(self) -> None:
        self.largest = 0

    def cutlass_fused_moe_workspace_size(self, tokens, *_, use_deepseek_fp8_block_scale=False, **__):
        if use_deepseek_fp8_block_scale:
            self.largest = tokens = max(self.largest, tokens)
        return 100 + 7 * tokens

    def cutlass_fused_moe(self, **call):
        block = call.get("use_deepseek_fp8_block_scale", False)
        needed = self.cutlass_fused_moe_workspace_size(len(call["input"]), use_deepseek_fp8_block_scale=block)
        assert call["workspace_buffer"].numel() == needed
        cutlass_fused_moe(**call)


CUTLASS = Cutlass()


# ------------------------------------------------------------------- TRTLLM


def unshuffled(w, tile):
    """The inverse of the library's shuffle of rows, from its table: row r of a block goes to place map[r]."""
    block = 32 if tile % 128 == 0 else 16
    source = torch.arange(block)
    place = source % (block // 8) * 8 + source // (block // 8)
    rows = (torch.arange(0, w.shape[0], block)[:, None] + place).flatten()
    return w[rows]


def untiled(scale):
    rows, groups = scale.shape
    tiles = scale.view(rows // 128, groups // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, groups)


def matrices(call, expert, gated):
    """(up, gate or the only part, w2) of one expert in float32, from the bytes of the library's layout."""
    w13, w2 = call["gemm1_weights"][expert], call["gemm2_weights"][expert]
    if call.get("weight_layout") == 2:  # blocks of 128 columns
        w13, w2 = (w.transpose(0, 1).reshape(w.shape[1], -1) for w in (w13, w2))
        w13, w2 = (unshuffled(w.view(torch.uint8), 64).view(E4M3).float() for w in (w13, w2))
        w13 = w13 * repeated(call["gemm1_weights_scale"][expert], *w13.shape)
        w2 = w2 * repeated(call["gemm2_weights_scale"][expert], *w2.shape)
        up, gate = w13.chunk(2)
        return up, gate, w2
    w13, w2 = (unshuffled(w.view(torch.uint8), 128).view(E4M3).float() for w in (w13, w2))
    if "gemm1_weights_scale" in call:
        scales = (call["gemm1_weights_scale"][expert], call["gemm2_weights_scale"][expert])
        first, second = (e8m0_to_float32(unshuffled(untiled(s), 128)) for s in scales)
        w13, w2 = w13 * repeated(first, *w13.shape), w2 * repeated(second, *w2.shape)
    return (w13[0::2], w13[1::2], w2) if gated else (None, w13, w2)


def computed(call, ids, weights):
    """The layer's output from the library's arguments; experts that live elsewhere count nothing."""
    gated = call.get("activation_type", 3) == 3
    kind = call.get("activation_type", 3)
    x = call["hidden_states"].float()
    per_tensor = "hidden_states_scale" not in call
    block = call.get("weight_layout") == 2
    if block:
        x = x * call["hidden_states_scale"].t().repeat_interleave(128, 1)
    elif not per_tensor:
        x = x * e8m0_to_float32(call["hidden_states_scale"]).repeat_interleave(32, 1)
    total = torch.zeros(call["output"].shape)
    assert call["num_experts"] % 4 == 0
    assert call["num_experts"] > call["top_k"]
    assert ((ids >= 0) & (ids < call["num_experts"])).all()
    for expert in range(call["local_num_experts"]):
        token, slot = (ids == expert + call["local_expert_offset"]).nonzero(as_tuple=True)
        if not len(token):
            continue
        up, gate, w2 = matrices(call, expert, gated)
        assert gate.shape[0] == call["intermediate_size"]
        if per_tensor:
            assert not call["use_routing_scales_on_input"]
            second = x[token] @ gate.t() * call["output1_scales_gate_scalar"][expert]
            factor = call["output1_scales_scalar"][expert]
            h = activate(kind, x[token] @ up.t(), second) if gated else activate(kind, second, None)
            # a factor of the linear half is one of the product
            y = (h * factor).clamp(-448, 448).to(E4M3).float() @ w2.t() * call["output2_scales_scalar"][expert]
        else:
            names = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
            own = [one(call.get(name), expert) for name in names]
            second = x[token] @ gate.t()
            h = activate(kind, x[token] @ up.t(), second, *own) if gated else activate(kind, second, None)
            y = fake_quantize(h, kFp8Dynamic128Sym if block else kMxfp8Dynamic) @ w2.t()
        total.index_add_(0, token, y.bfloat16().float() * weights[token, slot, None])
    call["output"].copy_(total)


def routed(**call):
    ids, weights = call["topk_ids"]
    assert ids.dtype is torch.int32
    assert call["routing_bias"] is call["n_group"] is call["topk_group"] is call["routed_scaling_factor"] is None
    computed(call, ids, weights)


def routing(**call):
    method = RoutingMethodType(call["routing_method_type"])
    groups = {}
    if method is RoutingMethodType.DeepSeekV3:
        groups = {"num_expert_group": call["n_group"], "topk_group": call["topk_group"]}
    else:
        assert not call["n_group"]
        assert not call["topk_group"]
    factor = 1.0
    if method in (RoutingMethodType.DeepSeekV3, RoutingMethodType.MiniMax2):
        factor = call["routed_scaling_factor"]
    else:
        assert call["routed_scaling_factor"] is None  # the kernel would not look at it
    config = RoutingConfig.from_method(method, routed_scaling_factor=factor, **groups)
    weights, ids = route(
        call["routing_logits"], top_k=call["top_k"], config=config, correction_bias=call["routing_bias"]
    )
    computed(call, ids, weights)


TRTLLM = SimpleNamespace(
    trtllm_fp8_block_scale_moe=routing,
    trtllm_fp8_block_scale_routed_moe=routed,
    trtllm_fp8_per_tensor_scale_moe=routing,
    trtllm_fp8_per_tensor_scale_routed_moe=routed,
)


def doubled(experts, library, **changes):
    """``experts`` with the double in the library's place, for layers of few experts: it computes one after another."""
    few = min(experts.claims.max_experts, 12)
    claims = replace(experts.claims, requires=(TRITON,), max_experts=few, **changes)
    members = {"claims": claims, "library": staticmethod(lambda: library)}
    return type(f"Double{experts.__name__}", (experts,), members)


MONOLITHIC = [
    flashinfer_trtllm_monolithic.TrtLlmFp8TensorExpertsMonolithic,
    flashinfer_trtllm_monolithic.TrtLlmFp8BlockExpertsMonolithic,
    flashinfer_trtllm_monolithic.TrtLlmMxfp8ExpertsMonolithic,
]


@pytest.mark.parametrize("experts", MONOLITHIC, ids=lambda c: c.__name__)
def test_ranks_add_up_to_the_whole_layer_and_other_maps_are_no_silent_error(experts):
    ((weight_key, activation_key),) = experts.claims.keys
    routing = RoutingConfig.from_method(RoutingMethodType.Renormalize)
    config = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=256, intermediate_size=128, routing=routing)
    whole = make_weights(config, weight_key, activation_key, seed=0)
    if whole.w13_input_scale is not None:  # else each rank quantises x under the largest of its own
        whole = replace(whole, w13_input_scale=torch.full((8,), 0.02))
    torch.manual_seed(0)
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    logits = torch.randn(5, 8)

    def run(layer, weights, expert_map):
        device = DeviceInfo.parse("sm100")
        instance = doubled(experts, TRTLLM)(layer, weight_key=weight_key, activation_key=activation_key, device=device)
        kernel = FusedMoEKernel(instance, instance.convert(weights))
        return kernel.apply_monolithic(x, router_logits=logits, expert_map=expert_map).float()

    expected = run(config, whole, None)
    parts = []
    for rank in (0, 1):
        layer = replace(config, num_local_experts=4, parallel=FusedMoEParallelConfig(ep_size=2, ep_rank=rank))
        own = slice(4 * rank, 4 * rank + 4)
        part = replace(whole, **{name: tensor[own] for name, tensor in whole.tensors()})
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[own] = torch.arange(4, dtype=torch.int32)
        parts.append(run(layer, part, expert_map))
        assert run(layer, part, expert_map.roll(1)).isnan().all()
        expert_map[own] = torch.tensor([1, 0, 2, 3], dtype=torch.int32)
        assert run(layer, part, expert_map).isnan().all()
    # each sum is rounded to bfloat16 once: by at most 2^-8 of itself
    bound = (expected.abs() + parts[0].abs() + parts[1].abs()) * 2**-8
    assert (parts[0] + parts[1] - expected).abs().le(bound + 2**-20).all()


class TestCutlassTensor(ConformanceTests):
    experts = doubled(flashinfer_cutlass.FlashInferCutlassFp8TensorExperts, CUTLASS)
    device = "cpu"


class TestCutlassBlock(ConformanceTests):
    experts = doubled(flashinfer_cutlass.FlashInferCutlassFp8BlockExperts, CUTLASS)
    device = "cpu"


def block_layer(library, tokens):
    """A kernel of the block experts around ``library``, and inputs for it."""
    experts = doubled(flashinfer_cutlass.FlashInferCutlassFp8BlockExperts, library)
    config = FusedMoEConfig(num_experts=4, top_k=2, hidden_size=128, intermediate_size=128)
    ((weight_key, activation_key),) = experts.claims.keys
    weights = make_weights(config, weight_key, activation_key, seed=0)
    instance = experts(config, weight_key=weight_key, activation_key=activation_key, device=DeviceInfo.parse("sm90"))
    kernel = FusedMoEKernel(instance, instance.convert(weights), default_prepare_finalize(config))
    return kernel, make_inputs(config, tokens, seed=0)


@on_a_cpu
def test_small_calls_after_a_large_one():
    kernel, inputs = block_layer(Cutlass(), 40)

    def run(tokens):
        weights, ids = inputs.topk_weights[:tokens], inputs.topk_ids[:tokens]
        return kernel.apply(inputs.x[:tokens], topk_weights=weights, topk_ids=ids)

    first, _, again = run(3), run(40), run(3)
    assert torch.equal(first, again)


@on_a_cpu
def test_hidden_states_and_outputs_at_any_address():
    kernel, inputs = block_layer(Cutlass(), 2)
    routing = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    x, output = (torch.zeros(1 + 2 * 128, dtype=torch.bfloat16)[1:].view(2, 128) for _ in range(2))
    assert x.data_ptr() % 16
    x.copy_(inputs.x)
    assert torch.equal(kernel.apply(x, **routing, output=output), kernel.apply(inputs.x, **routing))
    assert output.any()


def test_values_between_two_codes_go_where_the_library_rounds_them():
    config = FusedMoEConfig(num_experts=4, top_k=2, hidden_size=256, intermediate_size=128)
    experts = flashinfer_cutlass.FlashInferCutlassFp8BlockExperts
    ((weight_key, activation_key),) = experts.claims.keys
    instance = experts(config, weight_key=weight_key, activation_key=activation_key, device=DeviceInfo.parse("sm90"))
    x = torch.randn(500, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0] = 0
    told = instance.break_ties(x)
    assert told.dtype is torch.float32
    assert torch.allclose(fake_quantize(told, activation_key), in_groups(x.float()), rtol=1e-5, atol=0)
    assert not torch.allclose(fake_quantize(x.float(), activation_key), in_groups(x.float()), rtol=1e-5, atol=0)


class TestTrtLlmTensorModular(ConformanceTests):
    experts = doubled(flashinfer_trtllm_modular.TrtLlmFp8TensorExpertsModular, TRTLLM)
    device = "cpu"


class TestTrtLlmBlockModular(ConformanceTests):
    experts = doubled(flashinfer_trtllm_modular.TrtLlmFp8BlockExpertsModular, TRTLLM)
    device = "cpu"


class TestTrtLlmMxfp8Modular(ConformanceTests):
    experts = doubled(flashinfer_trtllm_modular.TrtLlmMxfp8ExpertsModular, TRTLLM)
    device = "cpu"


class TestTrtLlmTensorMonolithic(ConformanceTests):
    experts = doubled(flashinfer_trtllm_monolithic.TrtLlmFp8TensorExpertsMonolithic, TRTLLM)
    device = "cpu"


class TestTrtLlmBlockMonolithic(ConformanceTests):
    experts = doubled(flashinfer_trtllm_monolithic.TrtLlmFp8BlockExpertsMonolithic, TRTLLM)
    device = "cpu"


class TestTrtLlmMxfp8Monolithic(ConformanceTests):
    experts = doubled(flashinfer_trtllm_monolithic.TrtLlmMxfp8ExpertsMonolithic, TRTLLM)
    device = "cpu"
