"""Memory that conversion to the layouts of kernel libraries takes on a GPU; no library is needed for it."""

from __future__ import annotations

import pytest
import torch
from moe_core import FusedMoEActivationFormat, FusedMoEConfig, MoEWeights
from moe_core.spec.device import DeviceInfo
from moe_core.spec.roles import scale_shape
from moe_fp8.scheme import SCHEME

pytestmark = pytest.mark.gpu

LIBRARIES = ("flashinfer_trtllm", "flashinfer_cutlass", "deep_gemm")
CASES = [
    pytest.param(experts, arch, size, id=f"{experts.__name__}-{arch}-{size}")
    for backend in SCHEME.backends
    if backend.name in LIBRARIES
    for experts in backend.load()
    for arch in ("sm90", "sm100")
    if any(r.reason_against(DeviceInfo.parse(arch)) is None for r in experts.claims.devices)
    for size in (2048, 2040, 2016)  # the others are padded
    if size % experts.claims.intermediate_multiple == 0
]
EXPERTS, HIDDEN = 64, 4096


@pytest.mark.parametrize(("experts", "arch", "size"), CASES)
def test_a_layer_is_converted_in_the_memory_of_its_result(experts, arch, size):
    ((weight_key, activation_key),) = experts.claims.keys
    (layout,) = experts.claims.formats
    batched = {} if layout is FusedMoEActivationFormat.STANDARD else {"max_num_tokens": 64}
    config = FusedMoEConfig(
        num_experts=EXPERTS,
        top_k=2,
        hidden_size=HIDDEN,
        intermediate_size=size,
        activation_format=layout,
        **batched,
    )

    def scales(rows, cols, parts):
        shape = scale_shape(weight_key, EXPERTS, rows, cols, parts)
        if weight_key.scale.dtype is torch.float32:
            return torch.rand(shape, device="cuda") + 0.5
        return torch.full(shape, 120, dtype=torch.uint8, device="cuda").view(weight_key.scale.dtype)

    def codes(*shape):
        return torch.zeros(shape, dtype=torch.uint8, device="cuda").random_(0, 120).view(torch.float8_e4m3fn)

    inputs = {}
    if activation_key.is_static:
        inputs = {name: torch.rand(EXPERTS, device="cuda") + 0.5 for name in ("w13_input_scale", "w2_input_scale")}
    weights = MoEWeights(
        weight_key=weight_key,
        activation_key=activation_key,
        w13=codes(EXPERTS, 2 * size, HIDDEN),
        w2=codes(EXPERTS, HIDDEN, size),
        w13_scale=scales(2 * size, HIDDEN, 2),
        w2_scale=scales(HIDDEN, size, 1),
        **inputs,
    )
    weights.validate(config)
    instance = experts(config, weight_key=weight_key, activation_key=activation_key, device=DeviceInfo.parse(arch))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    converted = instance.convert(weights)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * weights.nbytes
    assert converted.w13.device == weights.w13.device
