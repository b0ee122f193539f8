"""FlashInfer's CUTLASS fused MoE: its adapters around a double, and the library where it and a GPU are there.

The double reads codes and scales from the places in which the library's kernels look for them, written down here one by
one.  That the calls fit the installed library, and layouts what its sources write, is tested in tests/libraries.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from moe_core import (
    TRITON,
    ActivationParams,
    Environment,
    FusedMoEConfig,
    FusedMoEKernel,
    MoEActivation,
    kMxfp4Static,
    kMxfp8Dynamic,
)
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.reference.quantization import fake_quantize
from moe_core.reference.tolerance import expected_output
from moe_core.spec.activation import apply_moe_activation
from moe_core.spec.device import DeviceInfo
from moe_core.spec.numerics import E2M1_VALUES, e8m0_to_float32
from moe_core.testing import ConformanceTests
from moe_core.testing.data import make_inputs, make_weights
from moe_kit.trtllm_double import untiled
from moe_mxfp4 import Mxfp4MoeBackend, mxfp4_round_up_hidden_size_and_intermediate_size
from moe_mxfp4.experts.flashinfer_cutlass import FlashInferCutlassMxfp4Bf16Experts, FlashInferCutlassMxfp4Mxfp8Experts
from moe_mxfp4.libraries import FLASHINFER
from moe_mxfp4.libraries.hopper_layout import mixed_gemm_scales, mixed_gemm_weights

MISSING = Environment.current().reason_against(FLASHINFER)
CLASSES = (FlashInferCutlassMxfp4Bf16Experts, FlashInferCutlassMxfp4Mxfp8Experts)
#: K and N both padded to 128
LAYER = FusedMoEConfig(
    num_experts=4, top_k=2, hidden_size=160, intermediate_size=96, activation=MoEActivation.SWIGLUOAI, has_bias=True
)
ACTIVATIONS = {
    0: MoEActivation.GELU_NO_MUL,
    2: MoEActivation.SILU_NO_MUL,
    3: MoEActivation.SILU,
    4: MoEActivation.GELU,
    6: MoEActivation.RELU2_NO_MUL,
    7: MoEActivation.SWIGLUSTEP,
    8: MoEActivation.GELU_TANH,
}
on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton does not interpret where there is a GPU")


@pytest.mark.gpu
@pytest.mark.skipif(MISSING is not None, reason="FlashInfer is not installed")
class TestFlashInferCutlassMxfp4(ConformanceTests):
    experts = FlashInferCutlassMxfp4Bf16Experts


@pytest.mark.gpu
@pytest.mark.skipif(MISSING is not None, reason="FlashInfer is not installed")
def test_the_library_interleaves_weights_alike():
    from flashinfer.fused_moe import interleave_moe_weights_for_sm90_mixed_gemm

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("its kernel is of sm_90")
    w = torch.randint(0, 256, (3, 272, 192), dtype=torch.uint8, device="cuda")
    assert torch.equal(interleave_moe_weights_for_sm90_mixed_gemm(w, "fp4"), mixed_gemm_weights(w))


# ------------------------------------------------------------------ layouts

#: lowest bit of each of a code's four bits within half a word, by the code's number
BITS = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 10, 11, 14))


@functools.cache
def places(rows, columns):
    """(row, word, lowest bits [4]) of each code of a matrix."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    byte = column // 2
    place = row // 16 * 16 + byte // 8 % 2 * 8 + row % 8
    word = byte // 32 * 8 + byte // 16 % 2 * 4 + byte % 4
    number = byte // 4 % 2 * 2 + row // 8 % 2
    bits = torch.tensor(BITS)[number] + 16 * (column % 2)[..., None]
    return place, word, bits


def read_codes(w):
    """[rows, columns] of one expert's bytes in the library's order on sm_90."""
    rows, columns = w.shape[0], 2 * w.shape[1]
    words = w.contiguous().view(torch.int32).long()
    place, word, bits = places(rows, columns)
    found = (words[place, word][..., None] >> bits) & 1
    return (found << torch.arange(4)).sum(-1)


def read_scales(scale):
    """[rows, groups] of one expert's folded scales."""
    rows, groups = 64 * scale.shape[0], 4 * scale.shape[1]
    row, group = torch.meshgrid(torch.arange(rows), torch.arange(groups), indexing="ij")
    return scale[row // 64, group // 4, row % 16, row % 64 // 16 * 4 + group % 4]


def canonical_codes(w):
    return torch.stack((w & 15, w >> 4), dim=-1).flatten(-2).long()


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (48, 192), (256, 128)])
def test_every_code_has_its_place(rows, columns):
    w = torch.randint(0, 256, (3, rows, columns // 2), dtype=torch.uint8)
    packed = mixed_gemm_weights(w)
    assert packed.shape == w.shape
    for mine, given in zip(packed, w, strict=True):
        assert torch.equal(read_codes(mine), canonical_codes(given))


def test_every_scale_has_its_place():
    scale = torch.randint(0, 256, (3, 192, 12), dtype=torch.uint8)
    for mine, given in zip(mixed_gemm_scales(scale), scale, strict=True):
        assert torch.equal(read_scales(mine), given)


# ------------------------------------------------------------------- double


def matrix(w, scale, expert):
    """One expert's matrix [rows, K] float32."""
    if w.dtype is torch.uint8:
        codes, exponents = read_codes(w[expert]), read_scales(scale[expert])
        # a bfloat16 with this exponent is 0
        codes = codes.where(exponents.repeat_interleave(32, 1) != 0, 0)
    else:
        assert w.dtype is torch.int64
        assert scale.dtype is torch.int32
        codes, exponents = canonical_codes(w[expert].view(torch.uint8)), untiled(scale[expert].view(torch.uint8))
    return torch.tensor(E2M1_VALUES)[codes] * e8m0_to_float32(exponents).repeat_interleave(32, 1)


def activate(kind, first, second, alpha, beta, limit):
    """``first`` and ``second`` as the library names them: up (linear) and gate; ``second`` None without a gate."""
    if second is None:
        return apply_moe_activation(ACTIVATIONS[kind], first)
    both = torch.cat((second, first), 1)
    if alpha is not None:
        return apply_moe_activation(
            MoEActivation.SWIGLUOAI, both, ActivationParams(alpha=alpha, beta=beta, limit=limit)
        )
    return apply_moe_activation(ACTIVATIONS[kind], both, None if limit is None else ActivationParams(limit=limit))


class Library:
    """What is called of it."""

    @staticmethod
    def cutlass_fused_moe_workspace_size(
        tokens, hidden, inter, experts, top_k, *, x_dtype, weight_dtype, output_dtype, activation_type,
        use_fused_finalize, use_w4_group_scaling=False, use_mxfp8_act_scaling=False,
    ):  # fmt: skip
        assert use_w4_group_scaling != use_mxfp8_act_scaling
        kinds = {torch.uint8: torch.bfloat16, torch.int64: torch.float8_e4m3fn}
        assert kinds[weight_dtype] is x_dtype
        assert hidden % 128 == inter % 128 == 0
        return 100 + 7 * tokens

    @staticmethod
    def cutlass_fused_moe(
        *, input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output_dtype,
        quant_scales, output, workspace_buffer, activation_type, use_fused_finalize, fc1_expert_biases=None,
        fc2_expert_biases=None, swiglu_alpha=None, swiglu_beta=None, swiglu_limit=None, input_sf=None,
        swizzled_input_sf=True, use_w4_group_scaling=False, use_mxfp8_act_scaling=False,
    ):  # fmt: skip
        experts, hidden, width = fc2_expert_weights.shape
        inter = width * (2 if use_w4_group_scaling else 16)
        parts = fc1_expert_weights.shape[1] // inter
        assert parts == (2 if ACTIVATIONS[activation_type].is_gated else 1)
        assert token_selected_experts.dtype is torch.int32
        assert token_final_scales.dtype is torch.float32
        assert input.is_contiguous()
        assert input.data_ptr() % 16 == output.data_ptr() % 16 == 0
        assert output_dtype is output.dtype is torch.bfloat16
        assert input.shape == output.shape == (len(input), hidden)
        assert hidden % 128 == inter % 128 == 0
        assert not use_fused_finalize
        assert workspace_buffer.numel() == 100 + 7 * len(input)
        x = input.float()
        if use_mxfp8_act_scaling:
            assert input.dtype is torch.float8_e4m3fn
            assert not swizzled_input_sf
            assert input_sf.shape == (len(x), hidden // 32)
            x = x * e8m0_to_float32(input_sf).repeat_interleave(32, 1)
            first, one, second, other = quant_scales
            assert one.shape == other.shape == (experts,)
            assert first.shape == (experts, parts * inter, hidden // 128)
            assert second.shape == (experts, hidden, inter // 128)
            assert (one == 1).all()
        else:
            assert input.dtype is torch.bfloat16
            assert input_sf is None
            first, second = quant_scales
        total = torch.zeros(output.shape)
        for expert in range(experts):
            token, slot = (token_selected_experts == expert).nonzero(as_tuple=True)
            if not len(token):
                continue
            z = (x[token] @ matrix(fc1_expert_weights, first, expert).t()).bfloat16().float()
            if fc1_expert_biases is not None:
                assert fc1_expert_biases.dtype is fc2_expert_biases.dtype is torch.bfloat16
                z = z + fc1_expert_biases[expert].float()
            own = [None if t is None else float(t[expert]) for t in (swiglu_alpha, swiglu_beta, swiglu_limit)]
            up, gate = (z[:, :inter], z[:, inter:]) if parts == 2 else (z, None)
            h = activate(activation_type, up, gate, *own)
            h = fake_quantize(h, kMxfp8Dynamic) if use_mxfp8_act_scaling else h.bfloat16().float()
            y = (h @ matrix(fc2_expert_weights, second, expert).t()).bfloat16().float()
            if fc2_expert_biases is not None:
                y = y + fc2_expert_biases[expert].float()
            total.index_add_(0, token, y * token_final_scales[token, slot, None])
        output.copy_(total)


def doubled(experts):
    claims = replace(experts.claims, requires=(TRITON,))
    return type(f"Double{experts.__name__}", (experts,), {"claims": claims, "library": staticmethod(lambda: Library)})


class TestBf16(ConformanceTests):
    experts = doubled(FlashInferCutlassMxfp4Bf16Experts)
    device = "cpu"


class TestMxfp8(ConformanceTests):
    experts = doubled(FlashInferCutlassMxfp4Mxfp8Experts)
    device = "cpu"


def made(experts, config, weights=None):
    ((weight_key, activation_key),) = experts.claims.keys
    device = DeviceInfo.parse("sm90" if activation_key is None else "sm100")
    instance = doubled(experts)(config, weight_key=weight_key, activation_key=activation_key, device=device)
    return instance, instance.convert(weights or make_weights(config, weight_key, activation_key, seed=0))


@on_a_cpu
@pytest.mark.parametrize("experts", CLASSES, ids=lambda c: c.__name__)
@pytest.mark.parametrize(("hidden", "inter", "padded"), [(2880, 96, (2944, 128)), (64, 2880, (128, 2944))])
def test_padding_shows_neither_in_the_output_nor_in_its_shape(hidden, inter, padded, experts):
    # gpt-oss's size, once as K and once as N
    config = replace(LAYER, hidden_size=hidden, intermediate_size=inter)
    assert experts.padded_sizes(hidden, inter) == padded
    weights = make_weights(config, *experts.claims.keys[0], seed=0)
    instance, converted = made(experts, config, weights)
    assert converted.w13.shape == (4, 2 * padded[1], padded[0] // 2)
    inputs = make_inputs(config, 2, seed=0)
    given = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    output = FusedMoEKernel(instance, converted, default_prepare_finalize(config)).apply(inputs.x, **given)
    assert output.shape == (2, hidden)
    quantized = weights.activation_key is not None
    expected_output(inputs.x, weights, config, truncates=quantized, **given).compare(output, "result")


def test_what_the_backend_holds_is_stated():
    sizes = mxfp4_round_up_hidden_size_and_intermediate_size(Mxfp4MoeBackend.FLASHINFER_CUTLASS, 2880, 2880)
    assert sizes == (2944, 2944)


@pytest.mark.parametrize("experts", CLASSES, ids=lambda c: c.__name__)
def test_padding_is_zeros(experts):
    _, converted = made(experts, LAYER)
    quant = converted.quant_config
    for w, rows, columns in ((converted.w13, 96, 160), (converted.w2, 160, 96)):
        codes = read_codes(w[1]) if experts is FlashInferCutlassMxfp4Bf16Experts else canonical_codes(w[1])
        for part in codes.chunk(2) if w is converted.w13 else (codes,):
            assert (part[:rows, :columns] & 7).any(dim=1).all()
            assert not part[rows:].any()
            assert not part[:, columns:].any()
    assert not quant.w1_bias[:, 96:128].any()
    assert not quant.w2_bias[:, 160:].any()


@pytest.mark.parametrize("experts", CLASSES, ids=lambda c: c.__name__)
def test_up_comes_before_gate(experts):
    config = replace(LAYER, hidden_size=128, intermediate_size=128)
    weights = make_weights(config, *experts.claims.keys[0], seed=0)
    _, converted = made(experts, config, weights)
    expected = canonical_codes(weights.w13[2]).roll(128, 0)
    codes = converted.w13[2]
    assert torch.equal(
        read_codes(codes) if experts is FlashInferCutlassMxfp4Bf16Experts else canonical_codes(codes), expected
    )
    assert torch.equal(converted.quant_config.w1_bias, weights.w13_bias.roll(128, 1))


@pytest.mark.parametrize(
    ("activation", "params", "expected"),
    [
        (MoEActivation.SILU, None, {}),
        (MoEActivation.SILU, ActivationParams(limit=0.75), {"swiglu_limit": 0.75}),
        (MoEActivation.SWIGLUOAI, None, {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0}),
        (
            MoEActivation.SWIGLUOAI,
            ActivationParams(alpha=1.25, beta=0.5, limit=3.0),
            {"swiglu_alpha": 1.25, "swiglu_beta": 0.5, "swiglu_limit": 3.0},
        ),
    ],
)
def test_alpha_beta_and_limit_are_the_config_s(activation, params, expected):
    for experts in CLASSES:
        _, converted = made(experts, replace(LAYER, activation=activation, activation_params=params))
        found = {name: tensor for name, tensor in converted.extra.items() if name.startswith("swiglu_")}
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert tensor.dtype is torch.float32
            assert tensor.tolist() == [pytest.approx(expected[name])] * 4


def test_each_class_is_of_one_architecture():
    environment = Environment({"flashinfer-python": "0.7.2.post1", "triton": "3.6.0"})

    def reasons(experts, activation_key, device):
        return "; ".join(
            experts.unsupported_reasons(
                LAYER, kMxfp4Static, activation_key, DeviceInfo.parse(device), environment=environment
            )
        )

    bf16, mxfp8 = CLASSES
    assert reasons(bf16, None, "sm90") == reasons(mxfp8, kMxfp8Dynamic, "sm100") == ""
    assert "needs sm90" in reasons(bf16, None, "sm100")
    assert "needs sm100 to sm109" in reasons(mxfp8, kMxfp8Dynamic, "sm90")
    assert "does not take activations quantized as nothing (16-bit)" in reasons(mxfp8, None, "sm100")
