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
    FusedMoEConfig,
    FusedMoEKernel,
    MoEActivation,
    kFp8Dynamic128Sym,
    kMxfp8Dynamic,
)
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.reference.quantization import fake_quantize
from moe_core.spec.activation import apply_moe_activation
from moe_core.spec.device import DeviceInfo
from moe_core.spec.numerics import e8m0_to_float32
from moe_core.spec.routing import RoutingConfig, RoutingMethodType
from moe_core.testing import ConformanceTests
from moe_core.testing.data import make_inputs, make_weights
from moe_fp8.experts import flashinfer_cutlass, flashinfer_trtllm
from moe_kit.trtllm_double import (
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
    return gated(first, second, alpha, beta, limit, activation=activation)


def one(tensor, expert):
    return None if tensor is None else float(tensor[expert])


def repeated(scale, rows, columns):
    """Block scales of one matrix for each of its elements."""
    grid = scale.repeat_interleave(rows // scale.shape[0], 0)
    return grid.repeat_interleave(columns // scale.shape[1], 1)


# ------------------------------------------------------------------ CUTLASS


def in_groups(x):
    """Quantized as the library does it: multiplied by 448 / amax, and by that one's reciprocal."""
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
    assert call["hidden_states"].data_ptr() % 16 == call["output"].data_ptr() % 16 == 0
    x = call["hidden_states"].float()
    per_tensor = "hidden_states_scale" not in call
    block = call.get("weight_layout") == 2
    if block:
        x = x * call["hidden_states_scale"].t().repeat_interleave(128, 1)
    elif not per_tensor:
        x = x * e8m0_to_float32(call["hidden_states_scale"]).repeat_interleave(32, 1)
    total = torch.zeros(call["output"].shape)
    check_ids(call, ids)
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
            own = activation_parameters(call, expert)
            second = x[token] @ gate.t()
            h = activate(kind, x[token] @ up.t(), second, *own) if gated else activate(kind, second, None)
            y = fake_quantize(h, kFp8Dynamic128Sym if block else kMxfp8Dynamic) @ w2.t()
        total.index_add_(0, token, y.bfloat16().float() * weights[token, slot, None])
    call["output"].copy_(total)


def routed(**call):
    computed(call, *given_routing(call))


def routing(**call):
    computed(call, *kernel_routing(call))


TRTLLM = SimpleNamespace(
    trtllm_fp8_block_scale_moe=routing,
    trtllm_fp8_block_scale_routed_moe=routed,
    trtllm_fp8_per_tensor_scale_moe=routing,
    trtllm_fp8_per_tensor_scale_routed_moe=routed,
)


MONOLITHIC = [
    flashinfer_trtllm.TrtLlmFp8TensorExpertsMonolithic,
    flashinfer_trtllm.TrtLlmFp8BlockExpertsMonolithic,
    flashinfer_trtllm.TrtLlmMxfp8ExpertsMonolithic,
]


@pytest.mark.parametrize("experts", MONOLITHIC, ids=lambda c: c.__name__)
def test_ranks_add_up_to_the_whole_layer_and_other_maps_are_no_silent_error(experts):
    ((weight_key, activation_key),) = experts.claims.keys
    routing = RoutingConfig.from_method(RoutingMethodType.Renormalize)
    config = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=256, intermediate_size=128, routing=routing)
    whole = make_weights(config, weight_key, activation_key, seed=0)
    if whole.w13_input_scale is not None:  # else each rank quantizes x under the largest of its own
        whole = replace(whole, w13_input_scale=torch.full((8,), 0.02))
    check_ranks(doubled(experts, TRTLLM), config, whole)


class TestCutlassTensor(ConformanceTests):
    experts = doubled(flashinfer_cutlass.FlashInferCutlassFp8TensorExperts, CUTLASS)
    device = "cpu"


class TestCutlassBlock(ConformanceTests):
    experts = doubled(flashinfer_cutlass.FlashInferCutlassFp8BlockExperts, CUTLASS)
    device = "cpu"


def layer_around(library, tokens, experts=flashinfer_cutlass.FlashInferCutlassFp8BlockExperts, hidden=128):
    """A kernel of ``experts`` around ``library``, and inputs for it."""
    experts = doubled(experts, library)
    config = FusedMoEConfig(num_experts=4, top_k=2, hidden_size=hidden, intermediate_size=128)
    ((weight_key, activation_key),) = experts.claims.keys
    weights = make_weights(config, weight_key, activation_key, seed=0)
    instance = experts(config, weight_key=weight_key, activation_key=activation_key, device=DeviceInfo.parse("sm90"))
    kernel = FusedMoEKernel(instance, instance.convert(weights), default_prepare_finalize(config))
    return kernel, make_inputs(config, tokens, seed=0)


@on_a_cpu
def test_small_calls_after_a_large_one():
    kernel, inputs = layer_around(Cutlass(), 40)

    def run(tokens):
        weights, ids = inputs.topk_weights[:tokens], inputs.topk_ids[:tokens]
        return kernel.apply(inputs.x[:tokens], topk_weights=weights, topk_ids=ids)

    first, _, again = run(3), run(40), run(3)
    assert torch.equal(first, again)


@on_a_cpu
@pytest.mark.parametrize("hidden", [128, 256])
@pytest.mark.parametrize(
    ("experts", "library"),
    [
        (flashinfer_cutlass.FlashInferCutlassFp8BlockExperts, Cutlass()),
        (flashinfer_trtllm.TrtLlmFp8TensorExpertsModular, TRTLLM),
        (flashinfer_trtllm.TrtLlmFp8BlockExpertsModular, TRTLLM),
        # K is padded to 256
        (flashinfer_trtllm.TrtLlmMxfp8ExpertsModular, TRTLLM),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_hidden_states_and_outputs_at_any_address(experts, library, hidden):
    kernel, inputs = layer_around(library, 2, experts, hidden)
    routing = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    x, output = (torch.zeros(1 + 2 * hidden, dtype=torch.bfloat16)[1:].view(2, hidden) for _ in range(2))
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
    experts = doubled(flashinfer_trtllm.TrtLlmFp8TensorExpertsModular, TRTLLM)
    device = "cpu"


class TestTrtLlmBlockModular(ConformanceTests):
    experts = doubled(flashinfer_trtllm.TrtLlmFp8BlockExpertsModular, TRTLLM)
    device = "cpu"


class TestTrtLlmMxfp8Modular(ConformanceTests):
    experts = doubled(flashinfer_trtllm.TrtLlmMxfp8ExpertsModular, TRTLLM)
    device = "cpu"


class TestTrtLlmTensorMonolithic(ConformanceTests):
    experts = doubled(flashinfer_trtllm.TrtLlmFp8TensorExpertsMonolithic, TRTLLM)
    device = "cpu"


class TestTrtLlmBlockMonolithic(ConformanceTests):
    experts = doubled(flashinfer_trtllm.TrtLlmFp8BlockExpertsMonolithic, TRTLLM)
    device = "cpu"


class TestTrtLlmMxfp8Monolithic(ConformanceTests):
    experts = doubled(flashinfer_trtllm.TrtLlmMxfp8ExpertsMonolithic, TRTLLM)
    device = "cpu"
