"""What FlashInfer's TRTLLM kernels are told, and which layers they are refused: no library and no GPU needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core import (
    Environment,
    FusedMoEConfig,
    MoEActivation,
    Oracle,
    RoutingConfig,
    RoutingMethodType,
    Selection,
    SelectionError,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    kFp8StaticTensorSym,
    kMxfp8Dynamic,
    kMxfp8Static,
)
from moe_core.api.libraries import TrtLlmRouted, TrtLlmRouting
from moe_core.kernels.libraries.flashinfer import ACTIVATION_TYPES
from moe_core.spec.config import FusedMoEParallelConfig
from moe_core.testing.data import make_weights
from moe_fp8 import Fp8MoeBackend
from moe_fp8.scheme import SCHEME
from torch import Tensor

KEYS = {
    "tensor": (kFp8StaticTensorSym, kFp8StaticTensorSym),
    "block": (kFp8Static128BlockSym, kFp8Dynamic128Sym),
    "mxfp8": (kMxfp8Static, kMxfp8Dynamic),
}
INSTALLED = Environment({"flashinfer-python": "0.7.2.post1", "triton": "3.6.0"})
UNGROUPED = RoutingConfig.from_method(RoutingMethodType.Renormalize)
GROUPED = RoutingConfig.from_method(
    RoutingMethodType.DeepSeekV3, num_expert_group=4, topk_group=2, routed_scaling_factor=2.5
)
LAYER = FusedMoEConfig(num_experts=16, top_k=2, hidden_size=256, intermediate_size=128, routing=UNGROUPED)


def select(config: FusedMoEConfig, kind: str) -> Selection:
    weight_key, activation_key = KEYS[kind]
    return Oracle(SCHEME).select(
        config,
        weight_key=weight_key,
        activation_key=activation_key,
        moe_backend=Fp8MoeBackend.FLASHINFER_TRTLLM,
        device="sm100",
        environment=INSTALLED,
    )


def refusal(config: FusedMoEConfig, kind: str) -> str:
    with pytest.raises(SelectionError) as caught:
        select(config, kind)
    return str(caught.value)


def call(config: FusedMoEConfig, kind: str) -> dict[str, object]:
    """The arguments of the library's call for three tokens."""
    selection = select(config, kind)
    experts = Oracle.make_experts(selection)
    weights = experts.convert(make_weights(config, *KEYS[kind], seed=0))
    output = torch.empty(3, config.hidden_size, dtype=config.dtype)
    inputs: dict[str, Tensor] = {"hidden_states": torch.empty(3, config.hidden_size, dtype=torch.float8_e4m3fn)}
    if isinstance(experts, TrtLlmRouting):
        routing = experts.routing_arguments(torch.randn(3, config.num_experts), None)
    else:
        assert isinstance(experts, TrtLlmRouted)
        ids = torch.zeros(3, config.top_k, dtype=torch.int32)
        routing = experts.routing_arguments(torch.ones(3, config.top_k), ids)
    return experts.arguments(output, inputs, weights, routing)


@pytest.mark.parametrize("routing", [UNGROUPED, None])
def test_the_activation_is_named_for_mxfp8_and_wherever_it_is_not_silu(routing):
    silu = replace(LAYER, routing=routing)
    squared = replace(silu, activation=MoEActivation.RELU2_NO_MUL)
    oai = replace(silu, activation=MoEActivation.SWIGLUOAI)
    assert "activation_type" not in call(silu, "block")
    assert "activation_type" not in call(silu, "tensor")
    assert call(silu, "mxfp8")["activation_type"] == 3
    assert call(oai, "block")["activation_type"] == 3
    # a default here would apply SwiGLU to a layer without a gate
    assert call(squared, "mxfp8")["activation_type"] == 6
    assert call(squared, "tensor")["activation_type"] == 6


def test_every_claimed_activation_has_its_number():
    for backend in SCHEME.backends[:1]:
        for experts in backend.load():
            assert experts.claims.activations <= ACTIVATION_TYPES.keys()


@pytest.mark.parametrize(("kind", "expected"), [("mxfp8", None), ("block", 0), ("tensor", 0)])
def test_ungrouped_routing_is_no_groups_for_mxfp8_and_zero_groups_otherwise(kind, expected):
    arguments = call(LAYER, kind)
    assert arguments["n_group"] is expected if expected is None else arguments["n_group"] == expected
    assert arguments["topk_group"] is expected if expected is None else arguments["topk_group"] == expected
    grouped = call(replace(LAYER, routing=GROUPED), kind)
    assert (grouped["n_group"], grouped["topk_group"]) == (4, 2)


def test_block_fp8_takes_ten_experts_per_token_and_mxfp8_more():
    many = replace(LAYER, num_experts=32, num_local_experts=32, top_k=11)
    assert "needs top_k <= 10, got 11" in refusal(many, "block")
    assert "needs top_k <= 10, got 11" in refusal(replace(many, routing=None), "block")
    assert select(replace(many, top_k=10), "block").backend == "flashinfer_trtllm"
    assert select(many, "mxfp8").backend == "flashinfer_trtllm"
    assert select(replace(many, top_k=22), "mxfp8").backend == "flashinfer_trtllm"


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
    routing = RoutingConfig.from_method(method, routed_scaling_factor=2.5)
    arguments = call(replace(LAYER, routing=routing), "block")
    assert arguments["routing_method_type"] == int(method)
    scaled = method is RoutingMethodType.MiniMax2
    assert arguments["routed_scaling_factor"] == (2.5 if scaled else None)
    assert call(replace(LAYER, routing=GROUPED), "block")["routing_method_type"] == 2
    assert call(replace(LAYER, routing=GROUPED), "block")["routed_scaling_factor"] == 2.5


@pytest.mark.parametrize("method", [RoutingMethodType.Default, RoutingMethodType.TopK, RoutingMethodType.DeepseekV4])
def test_methods_that_are_not_claimed_are_told_what_to_do(method):
    routed = replace(LAYER, routing=RoutingConfig.from_method(method))
    # routed elsewhere, the layer still runs: by the modular class
    assert "Modular" in select(routed, "block").experts.__name__


def test_a_rank_s_experts_are_named_by_their_offset():
    for rank in (0, 3):
        config = replace(LAYER, num_local_experts=4, parallel=FusedMoEParallelConfig(ep_size=4, ep_rank=rank))
        arguments = call(config, "mxfp8")
        assert (arguments["local_expert_offset"], arguments["local_num_experts"]) == (4 * rank, 4)
        assert arguments["num_experts"] == 16
        # ids are local ones before a modular call, and one expert more stands for those elsewhere
        modular = call(replace(config, routing=None), "mxfp8")
        assert (modular["local_expert_offset"], modular["local_num_experts"]) == (0, 4)
        assert modular["num_experts"] == 8


def reasons_of_monolithic(config: FusedMoEConfig, kind: str) -> str:
    from moe_core.spec.device import DeviceInfo

    experts = next(e for e in SCHEME.backends[0].load() if e.is_monolithic and e.claims.keys == (KEYS[kind],))
    reasons = experts.unsupported_reasons(config, *KEYS[kind], DeviceInfo.parse("sm100"), INSTALLED)
    return "; ".join(reasons)


@pytest.mark.parametrize("kind", list(KEYS))
def test_limits_of_the_routing_kernels_are_reasons_and_no_assertions(kind):
    def reasons(**changes: object) -> str:
        return reasons_of_monolithic(replace(LAYER, num_local_experts=None, **changes), kind)

    assert reasons() == ""
    assert "multiple of 4 experts, got 18" in reasons(num_experts=18)
    assert "at most 512 experts, got 516" in reasons(num_experts=516)
    assert reasons(num_experts=512) == ""
    assert "more experts than top_k 4" in reasons(num_experts=4, top_k=4)
    deep = RoutingConfig.from_method(RoutingMethodType.DeepSeekV3, num_expert_group=8, topk_group=5)
    assert "topk_group <= 4, got 5" in reasons(num_experts=64, routing=deep)
    assert "top_k <= 8 among 16 experts, got 9" in reasons(top_k=9, routing=replace(GROUPED, topk_group=4))
    assert "below the experts of the groups taken, got 8" in reasons(top_k=8, routing=GROUPED)
    assert "contiguous experts of a rank: 8 of 16" in reasons_of_monolithic(replace(LAYER, num_local_experts=8), kind)


def test_biases_and_router_weights_on_the_input_are_refused():
    assert "does not add biases" in refusal(replace(LAYER, has_bias=True), "mxfp8")
    on_input = replace(LAYER, top_k=1, apply_router_weight_on_input=True)
    assert "does not apply the router weight on the input" in refusal(on_input, "tensor")


def test_blackwell_prefers_it_and_hopper_does_not_know_it():
    config = replace(LAYER, routing=None)
    weight_key, activation_key = KEYS["block"]
    chosen = Oracle(SCHEME).select(
        config, weight_key=weight_key, activation_key=activation_key, device="sm100", environment=INSTALLED
    )
    assert chosen.backend == "flashinfer_trtllm"
    on_hopper = Oracle(SCHEME).select(
        config, weight_key=weight_key, activation_key=activation_key, device="sm90", environment=INSTALLED
    )
    assert on_hopper.backend == "triton"
    assert "flashinfer_cutlass" in [c.backend for c in on_hopper.report.candidates if c.fits]
