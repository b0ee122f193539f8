"""The call and the layout against the FlashInfer that is installed; no GPU needed."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from moe_core import (
    Environment,
    FusedMoEConfig,
    FusedMoEKernel,
    MoEActivation,
    MoEWeights,
    RoutingConfig,
    RoutingMethodType,
    kInt4Static32,
)
from moe_core.spec.device import DeviceInfo
from moe_core.testing.data import make_weights
from moe_wna16.experts.flashinfer_trtllm import (
    TrtLlmMxint4ExpertsModular,
    TrtLlmMxint4ExpertsMonolithic,
    pack_routing,
)
from moe_wna16.libraries import FLASHINFER

if Environment.current().reason_against(FLASHINFER) is not None:
    pytest.skip("FlashInfer is not installed (the nox session `libraries` installs it)", allow_module_level=True)

# the library warns of its own code and of a machine without a GPU
pytestmark = pytest.mark.filterwarnings("ignore")

LAYER = FusedMoEConfig(
    num_experts=8,
    top_k=2,
    hidden_size=256,
    intermediate_size=512,
    routing=RoutingConfig.from_method(RoutingMethodType.Renormalize),
)
GROUPED = RoutingConfig.from_method(RoutingMethodType.DeepSeekV3, num_expert_group=2, topk_group=1)


def experts(config, library=None):
    given = {} if library is None else {"library": staticmethod(lambda: library)}
    doubled = type("Recorded", (TrtLlmMxint4ExpertsMonolithic,), given)
    return doubled(config, weight_key=kInt4Static32, activation_key=None, device=DeviceInfo.parse("sm100"))


@pytest.mark.parametrize(
    "config",
    [
        LAYER,
        replace(LAYER, routing=GROUPED),
        replace(LAYER, activation=MoEActivation.SWIGLUOAI),
    ],
)
def test_the_call_fits_the_library(config):
    import flashinfer.fused_moe

    signature = inspect.signature(flashinfer.fused_moe.trtllm_mxint4_block_scale_moe)
    calls = []

    def record(**keywords):
        calls.append(signature.bind(**keywords).arguments)

    instance = experts(config, SimpleNamespace(trtllm_mxint4_block_scale_moe=record))
    kernel = FusedMoEKernel(instance, instance.convert(make_weights(config, kInt4Static32, None, seed=0)))
    output = torch.empty(3, 256, dtype=torch.bfloat16)
    bias = torch.zeros(8) if config.routing.has_correction_bias else None
    kernel.apply_monolithic(
        torch.randn(3, 256, dtype=torch.bfloat16),
        router_logits=torch.randn(3, 8),
        correction_bias=bias,
        output=output,
    )
    (bound,) = calls
    assert not {"kwargs", "args"} & bound.keys()
    assert bound["output"].data_ptr() == output.data_ptr()
    # what has a default is wanted as it is
    assert bound.keys() >= {
        name for name, parameter in signature.parameters.items() if parameter.default is inspect.Parameter.empty
    }


def test_the_call_with_a_routing_fits_the_library():
    import flashinfer.fused_moe

    signature = inspect.signature(flashinfer.fused_moe.trtllm_mxint4_block_scale_routed_moe)
    instance = TrtLlmMxint4ExpertsModular(
        LAYER, weight_key=kInt4Static32, activation_key=None, device=DeviceInfo.parse("sm100")
    )
    weights = instance.convert(make_weights(LAYER, kInt4Static32, None, seed=0))
    x = torch.empty(3, 256, dtype=torch.bfloat16)
    ids = torch.zeros(3, 2, dtype=torch.int32)
    given = instance.arguments(x, {"hidden_states": x}, weights, instance.routing_arguments(torch.ones(3, 2), ids))
    bound = signature.bind(**given).arguments
    assert not {"kwargs", "args"} & bound.keys()
    assert bound["topk_ids"] is ids
    assert bound["num_experts"] == 12


def test_a_routing_is_packed_as_the_library_packs_it():
    from flashinfer.fused_moe.runners import _pack_prerouted_topk_ids

    ids = torch.randint(0, 500, (7, 3), dtype=torch.int32)
    weights = torch.randn(7, 3)
    theirs = _pack_prerouted_topk_ids(SimpleNamespace(topk_ids=ids, topk_weights=weights))
    assert torch.equal(pack_routing(ids.clone(), weights), theirs)


def test_weights_are_what_the_library_prepares(monkeypatch):
    """The library quantizes 16-bit weights and lays them out; from its codes, conversion makes the same bytes."""
    from flashinfer.fused_moe import prepare
    from flashinfer.quantization import fp4_quantization

    monkeypatch.setattr(fp4_quantization, "block_scale_interleave", interleaved)
    size, hidden, count = LAYER.intermediate_size, LAYER.hidden_size, LAYER.num_experts
    up, gate = torch.randn(2, count, size, hidden, dtype=torch.bfloat16)
    w2 = torch.randn(count, hidden, size, dtype=torch.bfloat16)
    theirs = prepare.prepare_trtllm_mxint4_weights(
        torch.cat((up, gate), 1), w2, num_local_experts=count, hidden_size=hidden, intermediate_size=size
    )
    codes, scales = zip(*map(prepare._mxint4_quantize, (torch.cat((gate, up), 1), w2)), strict=True)
    weights = MoEWeights(
        weight_key=kInt4Static32,
        activation_key=None,
        w13=codes[0] ^ 0x88,
        w2=codes[1] ^ 0x88,
        w13_scale=scales[0].view(count, 2 * size, hidden // 32),
        w2_scale=scales[1].view(count, hidden, size // 32),
    )
    weights.validate(LAYER)
    converted = experts(LAYER).convert(weights)
    assert torch.equal(converted.w13, theirs["gemm1_weights"])
    assert torch.equal(converted.w2, theirs["gemm2_weights"])
    for ours, name in ((converted.quant_config.w1_scale, "gemm1"), (converted.quant_config.w2_scale, "gemm2")):
        assert torch.equal(ours.flatten(1), theirs[f"{name}_weights_scale"])


def interleaved(scale):
    """What the library's kernel of that name writes: it needs a GPU."""
    rows, groups = scale.shape
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(groups), indexing="ij")
    tile = (row // 128 * (groups // 4) + column // 4) * 512
    place = tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    out = scale.new_empty(scale.numel())
    out[place.flatten()] = scale.flatten()
    return out


def test_scales_are_read_back_by_the_library_s_reference():
    from flashinfer.trace.templates.gemm import _unswizzle_sf_128x4

    scale = torch.randint(0, 256, (256, 8), dtype=torch.uint8)
    assert torch.equal(_unswizzle_sf_128x4(interleaved(scale), 256, 8), scale)


def test_numbers_of_routing_methods():
    from flashinfer.tllm_enums import RoutingMethodType as Theirs

    for method in TrtLlmMxint4ExpertsMonolithic.claims.routing_methods:
        assert int(method) == int(Theirs[method.name])
