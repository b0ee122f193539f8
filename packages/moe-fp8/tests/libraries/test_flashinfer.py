"""Calls and layouts against the FlashInfer that is installed; no GPU needed.

Every call that an adapter makes is bound against the library's own signature, and every order of rows is compared with
the library's own helper.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from moe_core import (
    Environment,
    FusedMoEConfig,
    FusedMoEExperts,
    MoEActivation,
    RoutingConfig,
    RoutingMethodType,
)
from moe_core.kernels.libraries.flashinfer import ACTIVATION_TYPES
from moe_core.kernels.libraries.trtllm_layout import (
    shuffled_rows,
    trtllm_block_weights,
    trtllm_row_order,
    trtllm_scales,
    trtllm_weights,
)
from moe_core.reference.quantization import fake_quantize
from moe_core.spec.device import DeviceInfo
from moe_core.spec.workspace import Workspace
from moe_core.testing.data import make_inputs, make_weights
from moe_fp8.experts import flashinfer_cutlass, flashinfer_trtllm
from moe_fp8.libraries import FLASHINFER
from moe_fp8.scheme import SCHEME

if Environment.current().reason_against(FLASHINFER) is not None:
    pytest.skip("FlashInfer is not installed (the nox session `libraries` installs it)", allow_module_level=True)

# the library warns of its own code and of a machine without a GPU
pytestmark = pytest.mark.filterwarnings("ignore")

BACKENDS = [b for b in SCHEME.backends if b.name.startswith("flashinfer")]
CLASSES = [experts for backend in BACKENDS for experts in backend.load()]
ROUTINGS = [
    RoutingConfig.from_method(RoutingMethodType.Renormalize),
    RoutingConfig.from_method(RoutingMethodType.MiniMax2, routed_scaling_factor=2.5),
    RoutingConfig.from_method(RoutingMethodType.DeepSeekV3, num_expert_group=4, topk_group=2),
]


@pytest.fixture(scope="module")
def fused_moe():
    import flashinfer.fused_moe

    return flashinfer.fused_moe


class Recorder(SimpleNamespace):
    """The library's functions, each bound to its real signature instead of called."""

    def __init__(self, module: object) -> None:
        super().__init__(module=module, calls=[])

    def __getattr__(self, name: str):
        signature = inspect.signature(getattr(self.module, name))

        def record(*arguments, **keywords):
            bound = signature.bind(*arguments, **keywords)
            self.calls.append((name, bound.arguments))
            return 1024 if name.endswith("workspace_size") else None

        return record


def layers(experts: type[FusedMoEExperts]):
    routings = ROUTINGS if experts.is_monolithic else [None]
    for activation in sorted(experts.claims.activations, key=lambda a: a.value):
        for routing in routings:
            config = FusedMoEConfig(
                num_experts=16,
                top_k=2,
                hidden_size=256,
                intermediate_size=128,
                activation=activation,
                routing=routing,
            )
            yield config
            if experts.claims.bias:
                yield replace(config, has_bias=True)


@pytest.mark.parametrize("experts", CLASSES, ids=lambda c: c.__name__)
def test_calls_fit_the_library(experts, fused_moe):
    ((weight_key, activation_key),) = experts.claims.keys
    device = DeviceInfo.parse("sm90" if "Cutlass" in experts.__name__ else "sm100")
    recorder = Recorder(fused_moe)
    doubled = type("Recorded", (experts,), {"library": staticmethod(lambda: recorder)})
    for config in layers(experts):
        instance = doubled(config, weight_key=weight_key, activation_key=activation_key, device=device)
        weights = instance.convert(make_weights(config, weight_key, activation_key, seed=0))
        inputs = make_inputs(replace(config, dtype=torch.bfloat16), 3, seed=0)
        workspace = Workspace("cpu").take(instance.workspaces(3))
        output = torch.empty(3, config.hidden_size, dtype=torch.bfloat16)
        del recorder.calls[:]
        if experts.is_monolithic:
            has_bias = config.routing.has_correction_bias
            instance.apply(
                output,
                inputs.x,
                weights,
                router_logits=torch.randn(3, 16),
                correction_bias=torch.zeros(16) if has_bias else None,
                workspace=workspace,
            )
        else:
            call_modular(instance, output, inputs, weights, workspace)
        ((name, bound),) = recorder.calls
        assert name.startswith(("cutlass_fused_moe", "trtllm_fp8_"))
        # a keyword that the library swallowed in **options would not show in its signature
        assert not {"kwargs", "args"} & bound.keys()
        assert bound["output"] is output


def call_modular(instance, output, inputs, weights, workspace):
    """``apply`` without device code: the ids are local ones already."""
    ids = inputs.topk_ids.to(torch.int32)
    if isinstance(instance, flashinfer_cutlass.FlashInferCutlassExperts):
        arguments = instance.arguments(
            output,
            instance.library_input(inputs.x, weights, workspace),
            weights,
            topk_weights=inputs.topk_weights,
            local_ids=ids,
            library_workspace=workspace["library"],
        )
        instance.library().cutlass_fused_moe(**arguments)
        return
    routing = instance.routing_arguments(inputs.topk_weights, ids)
    instance.call(f"{instance.function}_routed_moe", output, inputs.x, weights, routing, workspace)


def test_the_workspace_size_is_asked_as_the_library_wants(fused_moe):
    recorder = Recorder(fused_moe)
    for experts in BACKENDS[1].load():
        doubled = type("Recorded", (experts,), {"library": staticmethod(lambda: recorder)})
        ((weight_key, activation_key),) = experts.claims.keys
        config = FusedMoEConfig(num_experts=16, top_k=2, hidden_size=256, intermediate_size=128)
        instance = doubled(
            config, weight_key=weight_key, activation_key=activation_key, device=DeviceInfo.parse("sm90")
        )
        instance.workspaces(5)
        name, bound = recorder.calls[-1]
        assert name == "cutlass_fused_moe_workspace_size"
        assert bound["max_num_tokens"] == 5
        assert bound["num_experts_total"] == 16


def test_numbers_of_enums(fused_moe):
    from flashinfer.tllm_enums import ActivationType, Fp8QuantizationType, WeightLayout
    from flashinfer.tllm_enums import RoutingMethodType as Theirs

    names = {
        MoEActivation.SILU: ActivationType.Swiglu,
        MoEActivation.SWIGLUOAI: ActivationType.Swiglu,
        MoEActivation.GELU: ActivationType.Geglu,
        MoEActivation.GELU_TANH: ActivationType.GegluTanh,
        MoEActivation.SWIGLUSTEP: ActivationType.SwigluStep,
        MoEActivation.GELU_NO_MUL: ActivationType.Gelu,
        MoEActivation.SILU_NO_MUL: ActivationType.Silu,
        MoEActivation.RELU2_NO_MUL: ActivationType.Relu2,
    }
    for activation, number in ACTIVATION_TYPES.items():
        assert number == int(names[activation])
        assert activation.is_gated == names[activation].is_gated
    assert int(WeightLayout.MajorK) == flashinfer_trtllm.MAJOR_K
    assert int(WeightLayout.BlockMajorK) == flashinfer_trtllm.BLOCK_MAJOR_K
    assert int(Fp8QuantizationType.DeepSeekFp8) == flashinfer_trtllm.DEEP_SEEK_FP8
    assert int(Fp8QuantizationType.MxFp8) == flashinfer_trtllm.MX_FP8
    for experts in CLASSES:
        for method in experts.claims.routing_methods or ():
            assert int(method) == int(Theirs[method.name])


def matrix(rows: int, columns: int, experts: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (experts, rows, columns), dtype=torch.uint8)


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("rows", [128, 384, 2048])
def test_shuffled_rows_are_the_library_s(rows, tile):
    from flashinfer.utils import get_shuffle_matrix_a_row_indices

    assert torch.equal(shuffled_rows(rows, tile), get_shuffle_matrix_a_row_indices(matrix(rows, 16)[0], tile))


@pytest.mark.parametrize("rows", [256, 1536])
def test_w13_of_fused_activations_is_what_the_library_s_helpers_make(rows):
    from flashinfer import reorder_rows_for_gated_act_gemm, shuffle_matrix_a

    w13 = matrix(rows, 48)
    gate, up = w13.chunk(2, dim=1)
    theirs = [
        shuffle_matrix_a(reorder_rows_for_gated_act_gemm(torch.cat((u, g))), 128) for g, u in zip(gate, up, strict=True)
    ]
    assert torch.equal(
        trtllm_weights(w13, trtllm_row_order(rows, 128, gated=True), rows // 2, 48, parts=2), torch.stack(theirs)
    )
    plain = torch.stack([shuffle_matrix_a(w, 128) for w in w13])
    assert torch.equal(trtllm_weights(w13, trtllm_row_order(rows, 128), rows, 48), plain)


@pytest.mark.parametrize(("rows", "columns"), [(256, 128), (512, 384)])
def test_block_major_weights_are_what_the_library_s_helpers_make(rows, columns):
    from flashinfer import shuffle_matrix_a
    from flashinfer.fused_moe import convert_to_block_layout

    w13 = matrix(rows, columns)
    gate, up = w13.chunk(2, dim=1)
    theirs = [
        convert_to_block_layout(shuffle_matrix_a(torch.cat((u, g)), 64), 128) for g, u in zip(gate, up, strict=True)
    ]
    ours = trtllm_block_weights(w13, trtllm_row_order(rows, 64, gated=True, in_turns=False))
    assert torch.equal(ours, torch.stack(theirs))


@pytest.mark.parametrize(("rows", "groups"), [(128, 4), (512, 88)])
def test_scales_are_read_back_by_the_library_s_reference(rows, groups):
    from flashinfer import reorder_rows_for_gated_act_gemm
    from flashinfer.trace.templates.gemm import _unswizzle_sf_128x4
    from flashinfer.utils import get_shuffle_matrix_sf_a_row_indices

    scale = matrix(rows, groups)
    ours = trtllm_scales(scale, trtllm_row_order(rows, 128, gated=True))
    for mine, given in zip(ours, scale, strict=True):
        gate, up = given.chunk(2)
        turns = reorder_rows_for_gated_act_gemm(torch.cat((up, gate)))
        shuffled = turns[get_shuffle_matrix_sf_a_row_indices(turns, 128, 32)]
        assert torch.equal(_unswizzle_sf_128x4(mine.flatten(), rows, groups), shuffled)


def test_activations_of_block_fp8_lie_as_the_library_reads_them():
    from moe_core import kFp8Dynamic128Sym, kFp8Static128BlockSym

    config = FusedMoEConfig(num_experts=4, top_k=2, hidden_size=256, intermediate_size=128)
    experts = BACKENDS[0].load()[3](
        config,
        weight_key=kFp8Static128BlockSym,
        activation_key=kFp8Dynamic128Sym,
        device=DeviceInfo.parse("sm100"),
    )
    weights = experts.convert(make_weights(config, kFp8Static128BlockSym, kFp8Dynamic128Sym, seed=0))
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    given = experts.library_input(x, weights, Workspace("cpu").take(experts.workspaces(5)))
    scale = given["hidden_states_scale"]
    assert scale.shape == (2, 5)
    assert scale.is_contiguous()
    values = given["hidden_states"].float() * scale.t().repeat_interleave(128, 1)
    assert torch.equal(values, fake_quantize(x.float(), kFp8Dynamic128Sym))
