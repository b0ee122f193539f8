"""Calls and layouts against the FlashInfer that is installed; no GPU needed.

Every call that an adapter makes is bound against the library's own signature, and every order is compared with the
library's own helper, or with what its source does where the helper is a kernel.
"""

from __future__ import annotations

import ctypes
import inspect
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from moe_core import (
    Environment,
    FusedMoEConfig,
    MoEActivation,
    MoEWeights,
    RoutingConfig,
    RoutingMethodType,
    kMxfp4Static,
    kMxfp8Dynamic,
)
from moe_core.kernels.libraries.flashinfer import ACTIVATION_TYPES
from moe_core.spec.device import DeviceInfo
from moe_core.spec.workspace import Workspace
from moe_core.testing.data import make_inputs, make_weights
from moe_mxfp4.experts import flashinfer_cutlass, flashinfer_trtllm
from moe_mxfp4.libraries import FLASHINFER
from moe_mxfp4.libraries.hopper_layout import mixed_gemm_scales, mixed_gemm_weights

if Environment.current().reason_against(FLASHINFER) is not None:
    pytest.skip("FlashInfer is not installed (the nox session `libraries` installs it)", allow_module_level=True)

# the library warns of its own code and of a machine without a GPU
pytestmark = pytest.mark.filterwarnings("ignore")

CUTLASS = (
    flashinfer_cutlass.FlashInferCutlassMxfp4Bf16Experts,
    flashinfer_cutlass.FlashInferCutlassMxfp4Mxfp8Experts,
)
TRTLLM = (flashinfer_trtllm.TrtLlmMxfp4ExpertsMonolithic, flashinfer_trtllm.TrtLlmMxfp4ExpertsModular)
ROUTINGS = [
    RoutingConfig.from_method(RoutingMethodType.Renormalize),
    RoutingConfig.from_method(RoutingMethodType.MiniMax2, routed_scaling_factor=2.5),
    RoutingConfig.from_method(RoutingMethodType.DeepSeekV3, num_expert_group=4, topk_group=2),
]
#: K and N both padded
LAYER = FusedMoEConfig(num_experts=16, top_k=2, hidden_size=160, intermediate_size=96, has_bias=True)


class Recorder(SimpleNamespace):
    """The library's functions, each bound to its real signature instead of called."""

    def __init__(self) -> None:
        import flashinfer.fused_moe

        super().__init__(module=flashinfer.fused_moe, calls=[])

    def __getattr__(self, name: str):
        signature = inspect.signature(getattr(self.module, name))

        def record(*arguments, **keywords):
            bound = signature.bind(*arguments, **keywords).arguments
            wanted = {n for n, p in signature.parameters.items() if p.default is inspect.Parameter.empty}
            # a keyword that the library swallowed in **options would not show in its signature
            assert not {"kwargs", "args"} & bound.keys()
            assert bound.keys() >= wanted
            self.calls.append((name, bound))
            return 1024 if name.endswith("workspace_size") else None

        return record


def made(experts, config, activation_key, recorder):
    doubled = type("Recorded", (experts,), {"library": staticmethod(lambda: recorder)})
    device = DeviceInfo.parse("sm90" if experts is CUTLASS[0] else "sm100")
    instance = doubled(config, weight_key=kMxfp4Static, activation_key=activation_key, device=device)
    weights = instance.convert(make_weights(config, kMxfp4Static, activation_key, seed=0))
    return instance, weights, Workspace("cpu").take(instance.workspaces(3))


@pytest.mark.parametrize("activation_key", [None, kMxfp8Dynamic], ids=str)
@pytest.mark.parametrize("activation", [MoEActivation.SILU, MoEActivation.SWIGLUOAI])
@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda r: r.method.name)
def test_calls_with_logits_fit_the_library(routing, activation, activation_key):
    config = replace(LAYER, routing=routing, activation=activation)
    recorder = Recorder()
    instance, weights, workspace = made(TRTLLM[0], config, activation_key, recorder)
    output, x = torch.empty(3, 160, dtype=torch.bfloat16), torch.randn(3, 160, dtype=torch.bfloat16)
    bias = torch.zeros(16) if routing.has_correction_bias else None
    logits = torch.randn(3, 16)
    instance.apply(output, x, weights, router_logits=logits, correction_bias=bias, workspace=workspace)
    ((name, bound),) = recorder.calls
    assert name == "trtllm_fp4_block_scale_moe"
    assert bound["output"] is output
    assert bound["hidden_states"].shape == (3, 256)


@pytest.mark.parametrize("activation_key", [None, kMxfp8Dynamic], ids=str)
def test_calls_with_a_routing_fit_the_library(activation_key):
    recorder = Recorder()
    instance, weights, workspace = made(TRTLLM[1], LAYER, activation_key, recorder)
    inputs = make_inputs(LAYER, 3, seed=0)
    output = torch.empty(3, 160, dtype=torch.bfloat16)
    # without device code: the ids are local ones already
    routing = instance.routing_arguments(inputs.topk_weights, inputs.topk_ids.to(torch.int32))
    instance.call("trtllm_fp4_block_scale_routed_moe", output, inputs.x, weights, routing, workspace)
    ((_, bound),) = recorder.calls
    assert bound["num_experts"] == 20
    from flashinfer.fused_moe.core import _split_precomputed_routing

    ids, weights, _ = _split_precomputed_routing(bound["topk_ids"])
    assert ids.dtype is torch.int32
    assert weights.dtype is torch.float32


@pytest.mark.parametrize("experts", CUTLASS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("activation", sorted(ACTIVATION_TYPES, key=lambda a: a.value))
def test_cutlass_calls_fit_the_library(activation, experts):
    ((_, activation_key),) = experts.claims.keys
    for config in (LAYER, replace(LAYER, has_bias=False)):
        config = replace(config, activation=activation)
        recorder = Recorder()
        instance, weights, workspace = made(experts, config, activation_key, recorder)
        ((name, asked),) = recorder.calls
        assert name == "cutlass_fused_moe_workspace_size"
        assert (asked["hidden_size"], asked["intermediate_size"]) == (256, 128)
        inputs = make_inputs(config, 3, seed=0)
        output = instance.library_output(torch.empty(3, 160, dtype=torch.bfloat16), workspace)
        given = instance.arguments(
            output,
            instance.library_input(inputs.x, weights, workspace),
            weights,
            topk_weights=inputs.topk_weights,
            local_ids=inputs.topk_ids.to(torch.int32),
            library_workspace=workspace["library"],
        )
        instance.library().cutlass_fused_moe(**given)
        _, bound = recorder.calls[-1]
        assert bound["output"].shape == (3, 256)
        assert ("fc1_expert_biases" in bound) == config.has_bias


def test_numbers_of_enums():
    from flashinfer.tllm_enums import DtypeTrtllmGen, SfLayout, deduce_trtllm_gen_tensor_dtype
    from flashinfer.tllm_enums import RoutingMethodType as Theirs

    assert int(SfLayout.layout_linear) == flashinfer_trtllm.LAYOUT_LINEAR
    for method in TRTLLM[0].claims.routing_methods:
        assert int(method) == int(Theirs[method.name])
    for activation_key, x_dtype in ((None, DtypeTrtllmGen.Bfloat16), (kMxfp8Dynamic, DtypeTrtllmGen.MxE4m3)):
        instance, weights, workspace = made(TRTLLM[1], LAYER, activation_key, Recorder())
        given = instance.library_input(make_inputs(LAYER, 3, seed=0).x, weights, workspace)
        assert deduce_trtllm_gen_tensor_dtype(given["hidden_states"], given["hidden_states_scale"]) == x_dtype
        call = instance.weight_arguments(weights)
        for name in ("gemm1", "gemm2"):
            found = deduce_trtllm_gen_tensor_dtype(call[f"{name}_weights"], call[f"{name}_weights_scale"])
            assert found == DtypeTrtllmGen.MxE2m1


# ------------------------------------------------------------------ layouts


def interleaved(scale):
    """What the library's kernel ``block_scale_interleave`` writes: it needs a GPU."""
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


def random_weights(config):
    """Canonical weights of random bytes, and biases in which every row differs."""
    count, hidden, size = config.num_experts, config.hidden_size, config.intermediate_size

    def codes(*shape):
        return torch.randint(0, 255, shape, dtype=torch.uint8)

    return MoEWeights(
        weight_key=kMxfp4Static,
        activation_key=None,
        w13=codes(count, 2 * size, hidden // 2),
        w2=codes(count, hidden, size // 2),
        w13_scale=codes(count, 2 * size, hidden // 32),
        w2_scale=codes(count, hidden, size // 32),
        w13_bias=torch.randn(count, 2 * size),
        w2_bias=torch.randn(count, hidden),
    )


def test_trtllm_weights_scales_and_biases_are_what_the_library_prepares(monkeypatch):
    """The library quantizes 16-bit weights and lays them out; from its codes, conversion makes the same bytes."""
    import flashinfer.fp4_quantization
    from flashinfer.fused_moe import api, core, prepare
    from flashinfer.quantization import fp4_quantization

    config = replace(LAYER, num_experts=2, num_local_experts=2, hidden_size=256, intermediate_size=384)
    weights = random_weights(config)
    up_first = {
        name: torch.cat(tuple(reversed(getattr(weights, name).chunk(2, dim=1))), 1) for name in ("w13", "w13_scale")
    }
    quantized = iter(((up_first["w13"], up_first["w13_scale"]), (weights.w2, weights.w2_scale)))

    def fp4_quantize(flat, **options):
        # the library's quantizer needs a GPU: these are the codes that it is to lay out
        assert options["sf_vec_size"] == 32
        values, scale = next(quantized)
        return values.flatten(0, 1), scale.flatten(0, 1)

    for module in (flashinfer.fp4_quantization, fp4_quantization):
        monkeypatch.setattr(module, "fp4_quantize", fp4_quantize)
        monkeypatch.setattr(module, "block_scale_interleave", interleaved)
    quant = api.QuantConfig(weight=api.QuantFormat.MXFP4, activation=api.QuantFormat.BF16)
    theirs = prepare.prepare_trtllm_fp4_weights(
        torch.zeros(2, 768, 256, dtype=torch.bfloat16),
        torch.zeros(2, 256, 384, dtype=torch.bfloat16),
        quant=quant,
        num_local_experts=2,
        hidden_size=256,
        intermediate_size=384,
        permute_cache={},
    )
    instance = TRTLLM[1](config, weight_key=kMxfp4Static, activation_key=None, device=DeviceInfo.parse("sm100"))
    converted = instance.convert(weights)
    call = instance.weight_arguments(converted)
    for name in ("gemm1", "gemm2"):
        assert torch.equal(call[f"{name}_weights"], theirs[f"{name}_weights"])
        scale = call[f"{name}_weights_scale"]
        assert scale.dtype is theirs[f"{name}_weights_scale"].dtype
        assert torch.equal(scale.view(torch.uint8), theirs[f"{name}_weights_scale"].view(torch.uint8))
    # biases follow the rows of their matrices
    bias = torch.cat(tuple(reversed(weights.w13_bias.chunk(2, dim=1))), 1)
    for expert in range(2):
        order = core._maybe_get_cached_w3_w1_permute_indices({}, weights.w13[expert], 128)
        assert torch.equal(call["gemm1_bias"][expert], bias[expert][order])
        order = core.get_w2_permute_indices_with_cache({}, weights.w2[expert], 128)
        assert torch.equal(call["gemm2_bias"][expert], weights.w2_bias[expert][order])


@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (192, 384)])
def test_folded_scales_are_what_the_library_s_helper_makes(rows, columns):
    from flashinfer.fused_moe import interleave_moe_scales_for_sm90_mixed_gemm

    scale = torch.randint(0, 256, (3, rows, columns // 32), dtype=torch.uint8)
    assert torch.equal(mixed_gemm_scales(scale), interleave_moe_scales_for_sm90_mixed_gemm(scale))


COMPILER = shutil.which("c++")


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler to run the library's kernel on the CPU")
@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (48, 192), (256, 128)])
def test_packed_weights_are_what_the_library_s_kernel_writes(tmp_path, rows, columns):
    import flashinfer

    kernel = "interleave_fp4_weights_for_sm90_mixed_gemm_kernel"
    (source,) = Path(flashinfer.__file__).parent.rglob("moe_gemm_mixed_utils.cu")
    found = re.search(rf"__global__ (void {kernel}\(.*?\n\}}\n)", source.read_text(), re.DOTALL)
    assert found is not None
    # one block of 16 threads, one after another
    code = f"""#include <cstdint>
        struct Numbers {{ int x, y; }};
        static Numbers blockIdx{{0, 0}}, gridDim{{1, 1}}, threadIdx{{0, 0}}, blockDim{{16, 1}};
        static {found[1]}
        extern "C" void run(uint8_t* given, uint8_t* out, int rows, int cols) {{
          for (threadIdx.x = 0; threadIdx.x < 16; ++threadIdx.x) {kernel}(given, out, rows, cols);
        }}"""
    (tmp_path / "kernel.cpp").write_text(code)
    library = tmp_path / "kernel.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, tmp_path / "kernel.cpp"], check=True)
    run = ctypes.CDLL(str(library)).run
    w = torch.randint(0, 256, (2, rows, columns // 2), dtype=torch.uint8)
    theirs = torch.empty_like(w)
    for given, out in zip(w, theirs, strict=True):
        run(ctypes.c_void_p(given.data_ptr()), ctypes.c_void_p(out.data_ptr()), rows, columns)
    assert torch.equal(mixed_gemm_weights(w), theirs)


def test_cutlass_weights_on_sm_100_keep_their_order():
    config = replace(LAYER, num_experts=2, num_local_experts=2, hidden_size=256, intermediate_size=384)
    weights = random_weights(config)
    instance = CUTLASS[1](
        config, weight_key=kMxfp4Static, activation_key=kMxfp8Dynamic, device=DeviceInfo.parse("sm100")
    )
    converted = instance.convert(weights)
    gate, up = weights.w13.chunk(2, dim=1)
    assert torch.equal(converted.w13, torch.cat((up, gate), 1))
    assert torch.equal(converted.w2, weights.w2)
    gate, up = weights.w13_scale.chunk(2, dim=1)
    first, _, second, _ = instance.quant_scales(converted)
    for given, ours in ((torch.cat((up, gate), 1), first), (weights.w2_scale, second)):
        for expert in range(2):
            assert torch.equal(ours[expert].view(torch.uint8).flatten(), interleaved(given[expert]))
