"""The conformance kit on sound experts of every kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_core import (
    GATED,
    Claims,
    ConfigError,
    RoutingMethodType,
    any_device,
    cuda,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    kFp8StaticTensorSym,
    kInt4Static32Asym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    kInt8StaticTensorAsym,
    kMxfp4Static,
    kMxfp8Dynamic,
    kMxfp8Static,
)
from moe_core.reference.torch_experts import TorchExperts
from moe_core.spec.quant_key import kInt4StaticAsym
from moe_core.testing import ConformanceTests, cases_for, run_case
from moe_core.testing.conformance import place_for
from moe_core_toys import (
    PLAIN,
    BatchedToyExperts,
    GpuToyExperts,
    MonolithicToyExperts,
    ToyExperts,
    UnreducedToyExperts,
)
from torch import Tensor

PERMUTED = replace(kInt4StaticAsym.with_group(1, 64), permuted=True)


class ManySchemes(TorchExperts):
    interface_api = (1, 0)
    claims = Claims(
        devices=(any_device(),),
        keys=(
            (kFp8Static128BlockSym, kFp8Dynamic128Sym),
            (kFp8StaticTensorSym, kFp8StaticTensorSym),
            (kMxfp8Static, kMxfp8Dynamic),
            (kMxfp4Static, None),
            (kInt8StaticChannelSym, kInt8DynamicTokenSym),
            (kInt8StaticChannelSym, kInt8StaticTensorAsym),
            (kInt4Static32Asym, None),
            (PERMUTED, None),
        ),
        activations=GATED,
        bias=True,
        cuda_graph=False,
    )


class AllMethods(MonolithicToyExperts):
    claims = replace(
        PLAIN,
        routing_methods=frozenset(RoutingMethodType) - {RoutingMethodType.Unspecified, RoutingMethodType.Simulated},
    )


class AssumesOneMethod(AllMethods):
    """Softmax and renormalize, whatever the layer's routing is."""

    def apply(self, output: Tensor, hidden_states: Tensor, *arguments: Any, **named: Any) -> None:
        from moe_core import RoutingConfig

        asked = self.config
        self.config = replace(asked, routing=RoutingConfig())
        super().apply(output, hidden_states, *arguments, **{**named, "correction_bias": None})
        self.config = asked


class TestToy(ConformanceTests):
    experts = ToyExperts
    device = "cpu"


class TestBatched(ConformanceTests):
    experts = BatchedToyExperts
    device = "cpu"


class TestUnreduced(ConformanceTests):
    experts = UnreducedToyExperts
    device = "cpu"


class TestMonolithic(ConformanceTests):
    experts = "moe_core_toys:MonolithicToyExperts"
    device = "cpu"


class TestManySchemes(ConformanceTests):
    experts = ManySchemes
    device = "cpu"


@pytest.mark.parametrize(
    "case",
    [case for case in cases_for(AllMethods, device="cpu") if case.check == "values"],
    ids=lambda case: case.id,
)
def test_every_routing_method(case: Any) -> None:
    run_case(AllMethods, case, device="cpu")


def test_a_routing_method_that_is_assumed_is_found() -> None:
    failed = set()
    for case in cases_for(AssumesOneMethod, device="cpu"):
        if case.check == "values" and case.tokens:
            try:
                run_case(AssumesOneMethod, case, device="cpu")
            except AssertionError:
                failed.add(case.config.routing.method)  # type: ignore[union-attr]
    # with one expert per token, or with all of them, some methods agree; softmax methods that renormalize always do
    assert failed >= {RoutingMethodType.Default, RoutingMethodType.Sigmoid, RoutingMethodType.DeepSeekV3}


def test_gpu_kernels_run_on_the_cpu_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert place_for(GpuToyExperts.claims, "cpu") is None
    assert not cases_for(GpuToyExperts, device="cpu")
    with pytest.raises(ConfigError, match="GpuToyExperts .*cpu"):
        run_case(GpuToyExperts, cases_for(ToyExperts, device="cpu")[0], device="cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    place = place_for(GpuToyExperts.claims, "cpu")
    assert place is not None
    assert place.target.arch == "sm90"
    assert place.device == torch.device("cpu")
    assert place.interpreted
    old = replace(GpuToyExperts.claims, devices=(cuda(max=80),))
    assert place_for(old, "cpu").target.arch == "sm80"  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="auto, cpu"):
        place_for(old, "tpu")
