"""What is said where no GPU kernel fits, and the warning of the layer that is built all the same."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch
from moe_core import (
    TRITON,
    Backend,
    Environment,
    FallbackWarning,
    FusedMoEConfig,
    KernelWeights,
    NoBackendError,
    Oracle,
    QuantKey,
    Requirement,
    SchemeSpec,
    SelectionReport,
    cuda,
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kInt8DynamicTokenSym,
    make_quant_config,
)
from moe_core_toys import PLAIN, ToyExperts

WEIGHT = kFp8StaticChannelSym
ALL = ((WEIGHT, None), (WEIGHT, kFp8DynamicTokenSym), (WEIGHT, kInt8DynamicTokenSym), (WEIGHT, kFp8StaticTensorSym))
NOT_INVARIANT = "with no batch invariance widen fits (batch_invariant=False)"
TWO = (
    "with 16-bit activations and no LoRA adapters widen fits (activation_key=None, max_loras=0, --activation-key none)"
)
CONFIG = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=64, intermediate_size=48)


class LoopExperts(ToyExperts):
    """Fits always, driven by the host."""

    claims = replace(
        PLAIN,
        keys=ALL,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        cuda_graph=False,
        lora=True,
        batch_invariant=True,
    )


class WidenExperts(ToyExperts):
    """16-bit activations only."""

    claims = replace(PLAIN, keys=((WEIGHT, None),), devices=(cuda(80),), dtypes=frozenset({torch.bfloat16}))


class LibraryExperts(ToyExperts):
    claims = replace(
        PLAIN, keys=ALL, devices=(cuda(100),), requires=(TRITON, Requirement("fast", "fast-kernels", "2.0"))
    )


class StaticExperts(ToyExperts):
    claims = replace(PLAIN, keys=((WEIGHT, kFp8StaticTensorSym),), devices=(cuda(90, 99),))


def reason_against(config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None) -> str | None:
    return "not with these sizes" if activation_key == kInt8DynamicTokenSym and config.hidden_size == 64 else None


KERNELS = SchemeSpec(
    "toy",
    interface_api=(1, 0),
    format_api=(1, 0),
    backends=(
        Backend("library", (LibraryExperts,)),
        Backend("static", (StaticExperts,)),
        Backend("widen", (WidenExperts,)),
        Backend("torch", (LoopExperts,)),
    ),
    reason_against=reason_against,
)


def report(
    device: str = "sm80",
    config: FusedMoEConfig = CONFIG,
    activation_key: QuantKey | None = kFp8DynamicTokenSym,
    backend: str = "auto",
) -> SelectionReport:
    return (
        Oracle(KERNELS)
        .select(
            config,
            weight_key=WEIGHT,
            activation_key=activation_key,
            device=device,
            moe_backend=backend,
            environment=Environment({"triton": "3.7"}),
        )
        .report
    )


def test_sixteen_bit_activations_are_named_with_the_argument_and_the_option() -> None:
    found = report()
    assert found.chosen is not None
    assert found.chosen.backend == "torch"
    (alternative,) = found.alternatives
    assert alternative.as_dict() == {
        "change": "16-bit activations",
        "backend": "widen",
        "argument": "activation_key=None",
        "command": "--activation-key none",
    }
    text = (
        "no GPU kernel fits on sm80: torch runs the layer as a loop driven by the host; "
        "with 16-bit activations widen fits (activation_key=None, --activation-key none)"
    )
    assert found.fallback == text
    assert text in str(found)
    data = json.loads(json.dumps(found.as_dict()))
    assert data["fallback"] == text
    assert data["alternatives"] == [alternative.as_dict()]


def test_what_is_said_is_true() -> None:
    assert report(activation_key=None).chosen.backend == "widen"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("device", "config", "activation_key", "expected"),
    [
        ("sm80", replace(CONFIG, is_lora_enabled=True), None, ["with no LoRA adapters widen fits (max_loras=0)"]),
        (
            "sm80",
            replace(CONFIG, batch_invariant=True),
            None,
            [NOT_INVARIANT],
        ),
        (
            "sm80",
            replace(CONFIG, dtype=torch.float16),
            None,
            ["with hidden states in bfloat16 widen fits (dtype=torch.bfloat16, --dtype bfloat16)"],
        ),
        (
            "sm80",
            replace(CONFIG, dtype=torch.float32),
            None,
            ["with hidden states in bfloat16 widen fits (dtype=torch.bfloat16, --dtype bfloat16)"],
        ),
        (
            "sm80",
            replace(CONFIG, is_lora_enabled=True),
            kFp8DynamicTokenSym,
            [TWO],
        ),
        (
            "sm100",
            CONFIG,
            kFp8DynamicTokenSym,
            [
                "with 16-bit activations widen fits (activation_key=None, --activation-key none)",
                "with fast-kernels library fits (pip install 'fast-kernels>=2.0')",
            ],
        ),
        ("gfx942", CONFIG, kFp8DynamicTokenSym, []),
    ],
)
def test_one_thing_is_changed_or_two(
    device: str, config: FusedMoEConfig, activation_key: QuantKey | None, expected: list[str]
) -> None:
    found = report(device, config, activation_key)
    assert [str(alternative) for alternative in found.alternatives] == expected
    assert found.fallback is not None
    if not expected:
        assert found.fallback.endswith("; no other request has one that fits")


@pytest.mark.parametrize(
    ("device", "activation_key", "backend"),
    [("cpu", kFp8DynamicTokenSym, "auto"), ("sm80", None, "auto"), ("sm80", kFp8DynamicTokenSym, "torch")],
)
def test_nothing_is_said_on_a_cpu_with_a_kernel_or_where_the_loop_was_asked_for(
    device: str, activation_key: QuantKey | None, backend: str
) -> None:
    found = report(device, activation_key=activation_key, backend=backend)
    assert found.fallback is None
    assert found.alternatives == ()


def test_an_error_names_them_too() -> None:
    without_loop = Oracle(replace(KERNELS, backends=KERNELS.backends[:-1]))
    with pytest.raises(NoBackendError, match="widen .*activation_key=None"):
        without_loop.select(
            CONFIG, weight_key=WEIGHT, activation_key=kFp8DynamicTokenSym, device="sm80", environment=Environment({})
        )


def weights(device: str) -> KernelWeights:
    scale = torch.ones(8, 1, device=device)
    quant = make_quant_config(weight_key=WEIGHT, activation_key=kFp8DynamicTokenSym, w1_scale=scale, w2_scale=scale)
    return KernelWeights(w13=torch.ones(8, 1, device=device), w2=torch.ones(8, 1, device=device), quant_config=quant)


def test_selecting_says_it_and_building_the_layer_on_the_device_warns() -> None:
    oracle = Oracle(KERNELS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        selection = oracle.select(
            CONFIG, weight_key=WEIGHT, activation_key=kFp8DynamicTokenSym, device="sm80", environment=Environment({})
        )
        # weights on the CPU are converted for a GPU that is elsewhere
        oracle.make_kernel(selection, weights("cpu"))
    assert not caught
    with pytest.warns(FallbackWarning, match="toy: .*widen"):
        oracle.make_kernel(selection, weights("meta"))
