"""Numbers at the edges, with every backend that a CPU or Triton's interpreter runs: equal to the reference.

How far a result may be off is what the conformance kit allows: see `moe_core.reference.tolerance`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core import (
    ActivationParams,
    FusedMoEConfig,
    FusedMoEKernel,
    MoEActivation,
    MoEWeights,
    kMxfp4Dynamic,
    kMxfp4Static,
    kMxfp8Dynamic,
)
from moe_core.parallel.prepare_finalize.no_parallel import PrepareAndFinalizeNoParallel
from moe_core.reference.fused_moe import fused_moe_reference
from moe_core.spec.quant_key import key_name
from moe_core.testing import expected_output, make_inputs, make_weights
from moe_core.testing.data import Inputs
from moe_mxfp4.experts.marlin import MarlinMxfp4Experts
from moe_mxfp4.experts.torch import TorchMxfp4Experts
from moe_mxfp4.experts.triton import TritonMxfp4Experts

#: experts and whether they are Triton's, which its interpreter runs where there is no GPU
BACKENDS = {
    "torch": TorchMxfp4Experts,
    "triton": TritonMxfp4Experts,
    "marlin": MarlinMxfp4Experts,
}
EVERY = pytest.mark.parametrize("backend", BACKENDS)
#: backends with the activations that they take
WITH_ACTIVATIONS = [
    pytest.param(name, key, id=f"{name}-{key_name(key)}")
    for name, experts in BACKENDS.items()
    for key in (None, kMxfp8Dynamic, kMxfp4Dynamic)
    if experts.claims.takes_keys(kMxfp4Static, key)
]
#: of gpt-oss
PARAMS = ActivationParams(alpha=1.702, beta=1.0, limit=7.0)
TOKENS = 5
#: bits of two codes that leave 0, 0.5, 1 and 1.5: float32 holds no more of 2**127
UP_TO_1_5 = 0xBB


def layer(**changed):
    sizes = {"num_experts": 3, "top_k": 2, "hidden_size": 96, "intermediate_size": 64}
    activation = {"activation": MoEActivation.SWIGLUOAI, "activation_params": PARAMS, "has_bias": True}
    return FusedMoEConfig(**(sizes | activation | changed))


def problem(config, activation_key=None):
    """Weights and inputs of the kit."""
    return make_weights(config, kMxfp4Static, activation_key, seed=3), make_inputs(config, TOKENS, seed=4)


def apply(backend, config, weights: MoEWeights, inputs: Inputs, device):
    """The output of a call, on the CPU."""
    instance = BACKENDS[backend](config, weight_key=kMxfp4Static, activation_key=weights.activation_key)
    kernel = FusedMoEKernel(instance, instance.convert(weights.to(device)), PrepareAndFinalizeNoParallel(config))
    given = inputs.to(device)
    return kernel.apply(given.x, topk_weights=given.topk_weights, topk_ids=given.topk_ids).cpu()


def check(backend, config, weights: MoEWeights, inputs: Inputs, device):
    """Compare a call with the reference; returns both as float64."""
    found = apply(backend, config, weights, inputs, device)
    routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    expected = expected_output(inputs.x, weights, config, **routed)
    expected.compare(found, backend)
    return found.double(), expected.exact


def with_scales(weights, w13=None, w2=None):
    """The weights with other e8m0 bytes."""
    changed = {}
    for name, change in (("w13", w13), ("w2", w2)):
        scale = getattr(weights, f"{name}_scale").clone()
        if change is not None:
            change(scale)
        changed[f"{name}_scale"] = scale
    return replace(weights, **changed)


def without_bias(weights):
    return replace(weights, w13_bias=torch.zeros_like(weights.w13_bias), w2_bias=torch.zeros_like(weights.w2_bias))


@EVERY
def test_smallest_scales(backend, device):
    """Every scale of w2 is 2**-127: results are tiny, and no zeros."""
    config = layer()
    weights, inputs = problem(config)
    weights = without_bias(with_scales(weights, w2=lambda scale: scale.fill_(0)))
    # large enough for normal numbers of bfloat16
    inputs = replace(inputs, topk_weights=inputs.topk_weights * 2.0**40)
    found, exact = check(backend, config, weights, inputs, device)
    assert 0 < exact.abs().max() < 2.0**-70
    assert (found != 0).float().mean() > 0.9


@EVERY
def test_largest_scales(backend, device):
    """Every scale of w13 is 2**127, of codes up to 1.5 and inputs so small that the products are ordinary."""
    config = layer(activation=MoEActivation.SILU, activation_params=None)
    weights, inputs = problem(config)
    weights = with_scales(replace(weights, w13=weights.w13 & UP_TO_1_5), w13=lambda scale: scale.fill_(254))
    _, exact = check(backend, config, weights, replace(inputs, x=inputs.x * 2.0**-115), device)
    assert 1e3 < exact.abs().max() < 1e12


@EVERY
def test_both_ends_in_one_row(backend, device):
    """Groups of 2**127 and of 2**-127 beside each other: the smaller ones add nothing, and nothing overflows."""
    config = layer(activation=MoEActivation.SILU, activation_params=None)
    weights, inputs = problem(config)

    def alternate(scale):
        scale[:, :, 0::2], scale[:, :, 1::2] = 254, 0

    weights = with_scales(replace(weights, w13=weights.w13 & UP_TO_1_5), w13=alternate)
    x = inputs.x * 2.0**-115
    x[:, 32:64] = inputs.x[:, 32:64] * 2.0**75
    _, exact = check(backend, config, weights, replace(inputs, x=x), device)
    assert 1e3 < exact.abs().max() < 1e12


@EVERY
def test_products_beyond_float32_meet_the_limit(backend, device):
    """2**127 with large inputs: gate and up are infinite in float32, and limited all the same."""
    config = layer(hidden_size=32)
    weights, inputs = problem(config)
    # one column with numbers, so that no sums cancel; the gate, which has no lower limit, is positive
    w13 = torch.zeros_like(weights.w13)
    w13[:, :, 0] = weights.w13[:, :, 0] & 0x08 | 0x02
    w13[:, : config.intermediate_size, 0] = 0x03
    weights = with_scales(replace(weights, w13=w13), w13=lambda scale: scale.fill_(254))
    inputs = replace(inputs, x=inputs.x.abs() * 2.0**20 + 1.0)
    routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    exact = fused_moe_reference(inputs.x, weights, config, **routed)
    found = apply(backend, config, weights, inputs, device)
    # h has few values, all exact; what is truncated by the interpreter, 2**-7 at most: each pair's result, the output
    assert float((found.double() - exact).norm() / exact.norm()) < 2 * 2**-7


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scales_a_few_powers_apart(backend, dtype, device):
    """Columns whose small weights meet large inputs count as much as the others."""
    config = layer(dtype=dtype)
    weights, inputs = problem(config)

    def spread(scale):
        scale[:, :, 1] = scale[:, :, 1].clamp_min(12) - 12

    x = inputs.x.clone()
    x[:, 32:64] *= 2.0**12
    _, exact = check(backend, config, with_scales(weights, w13=spread), replace(inputs, x=x), device)
    x[:, 32:64] = 0
    _, without = check(backend, config, with_scales(weights, w13=spread), replace(inputs, x=x), device)
    assert float((without - exact).norm()) > 0.1 * float(exact.norm())


@EVERY
def test_zeros_under_the_largest_scale(backend, device):
    """Whole rows of codes 0 and 8 with the scale 2**127, beside ordinary groups."""
    config = layer()
    weights, inputs = problem(config)
    codes = weights.w2.clone()
    codes[:, :16, :16], codes[:, 16:32, :16], codes[:, 32, :] = 0x00, 0x88, 0x80

    def largest(scale):
        scale[:, :32, 0], scale[:, 32] = 254, 254

    check(backend, config, with_scales(replace(weights, w2=codes), w2=largest), inputs, device)


@pytest.mark.parametrize(("backend", "activation_key"), WITH_ACTIVATIONS)
def test_subnormal_codes(backend, activation_key, device):
    """Nothing but 0.5 and -0.5."""
    config = layer()
    weights, inputs = problem(config, activation_key)
    codes = {name: getattr(weights, name) & 0x88 | 0x11 for name in ("w13", "w2")}

    def ordinary(scale):
        scale[scale == 254] = 127

    weights = with_scales(replace(weights, **codes), ordinary, ordinary)
    found, _ = check(backend, config, weights, inputs, device)
    assert found.abs().min() > 0


@EVERY
@pytest.mark.parametrize("on_input", [False, True])
def test_huge_router_weights(backend, on_input, device):
    config = layer(top_k=1 if on_input else 2, apply_router_weight_on_input=on_input)
    weights, inputs = problem(config)
    size = torch.tensor([1e30, 3e-30, 1e4, 0.0, -1e30])[:TOKENS, None]
    if on_input:
        size = torch.tensor([1e15, 3e-30, 1e4, 0.0, -1e15])[:TOKENS, None]
    check(backend, config, weights, replace(inputs, topk_weights=inputs.topk_weights * size), device)


@EVERY
@pytest.mark.parametrize("limit", [0.25, 7.0, float("inf")])
@pytest.mark.parametrize("alpha", [1.702, 0.5])
def test_limits(backend, limit, alpha, device):
    """Alpha and limit are the config's; most values are beyond a small limit."""
    config = layer(activation_params=ActivationParams(alpha=alpha, beta=1.0, limit=limit))
    weights, inputs = problem(config)
    check(backend, config, weights, replace(inputs, x=inputs.x * 4), device)


@EVERY
@pytest.mark.parametrize("sizes", [(160, 96), (65, 33), (31, 200), (416, 288)], ids=str)
def test_odd_sizes(backend, sizes, device):
    """Multiples of 32 alone, no whole groups, no whole words, one byte more than that."""
    hidden, inter = sizes
    config = layer(hidden_size=hidden, intermediate_size=inter)
    weights, inputs = problem(config)
    check(backend, config, weights, inputs, device)


@EVERY
def test_what_lies_beside_the_last_column(backend, device):
    """The other half of a row's last byte, and infinite biases of other experts, are read by no one."""
    config = layer(hidden_size=65, intermediate_size=33)
    weights, inputs = problem(config)
    codes = {name: getattr(weights, name).clone() for name in ("w13", "w2")}
    for tensor in codes.values():
        tensor[:, :, -1] |= 0x70
    bias = weights.w2_bias.clone()
    bias[2] = float("inf")
    ids = inputs.topk_ids.new_tensor([[0, 1]]).expand(TOKENS, 2).contiguous()
    found, _ = check(backend, config, replace(weights, w2_bias=bias, **codes), replace(inputs, topk_ids=ids), device)
    assert found.isfinite().all()
