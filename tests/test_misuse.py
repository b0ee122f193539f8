"""Layers of every scheme in wrong hands: each misuse raises a MoEError that names the argument, or the result is right.

``--moe-fuzz N`` makes N calls of each layer with several arguments changed at once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import FusedMoELayer, LoRA, MoEError, MoEWeights, kInt4Static32Asym, load_layer, registry, route
from moe_core.reference.tolerance import Expected, expected_output
from moe_core.testing.data import make_lora
from moe_core.testing.harness import same_bits
from moe_core_layers import Kind, some_kinds
from moe_core_misuse import IDS, MISUSES
from torch import Tensor

TOKENS = 5
#: what is asked of a layer beside its keys
SORTS: dict[str, dict[str, Any]] = {
    "batched": {"activation_format": "batched"},
    "part": {"num_local_experts": 3},
    "adapters": {"is_lora_enabled": True, "max_loras": 2, "max_lora_rank": 4},
}
CASES = [(kind, "standard") for kind in some_kinds(3)] + [
    (kind, sort) for kind, sort in zip(some_kinds(), itertools.cycle(SORTS), strict=False)
]
#: with tensors that other kinds have not: groups of columns, factors of inputs
PERMUTED = Kind("wna16", replace(kInt4Static32Asym, permuted=True, pre_scaled=True), None)


@dataclass(frozen=True, eq=False)
class Subject:
    """A layer, the weights that it was made from, and arguments that fit."""

    layer: FusedMoELayer
    weights: MoEWeights
    arguments: dict[str, Any]
    known: dict[tuple[Any, ...], Expected] = field(default_factory=dict)

    @staticmethod
    def of(kind: Kind, sort: str) -> Subject:
        layer = kind.layer(**SORTS.get(sort, {}))
        config = layer.config
        generator = torch.Generator().manual_seed(4)
        x = torch.randn(TOKENS, config.hidden_size, generator=generator).to(config.dtype)
        logits = torch.randn(TOKENS, config.num_experts, generator=generator)
        assert config.routing is not None
        topk_weights, topk_ids = route(logits, top_k=config.top_k, config=config.routing)
        places = torch.arange(config.num_experts, dtype=torch.int32).flip(0)
        arguments: dict[str, Any] = {
            "hidden_states": x,
            "topk_weights": topk_weights,
            "topk_ids": topk_ids,
            "expert_map": torch.where(places < config.local_experts, places, -1),
            "output": torch.empty_like(x),
        }
        if config.is_lora_enabled:
            layer.kernel.lora = make_lora(config, seed=1)
            arguments["adapter_ids"] = torch.tensor([0, 1, -1, 1, 0], dtype=torch.int32)
        layer.expert_map = arguments["expert_map"]
        return Subject(layer, kind.weights(config), arguments)

    def check(self, output: Tensor, given: dict[str, Any]) -> None:
        """Raise AssertionError unless ``output`` is what the reference says of the arguments."""
        assert tuple(output.shape) == tuple(given["hidden_states"].shape)
        given = {"expert_map": self.layer.expert_map} | given
        values = {name: plain(value) for name, value in given.items() if value is not None and name != "output"}
        values["hidden_states"] = values["hidden_states"].view(len(values["topk_ids"]), self.layer.config.hidden_size)
        values["topk_weights"] = values["topk_weights"].float()
        self.reference(values).compare(output.detach().reshape(values["hidden_states"].shape), "the result")

    def reference(self, values: dict[str, Tensor]) -> Expected:
        """The reference, computed once for the same values."""
        key = tuple((name, tuple(v.shape), v.dtype, bytes(v.view(torch.uint8).numpy())) for name, v in values.items())
        if key not in self.known:
            lora, adapter_ids = self.layer.lora, values.get("adapter_ids")
            self.known[key] = expected_output(
                values["hidden_states"],
                self.weights,
                self.layer.config,
                topk_weights=values["topk_weights"],
                topk_ids=values["topk_ids"],
                expert_map=values.get("expert_map"),
                lora=None if lora is None or adapter_ids is None else LoRA(lora, adapter_ids),
            )
        return self.known[key]


def plain(tensor: Tensor) -> Tensor:
    """The values in memory of their own."""
    return tensor.detach().as_subclass(Tensor).resolve_neg().clone(memory_format=torch.contiguous_format)


def case_id(case: tuple[Kind, str]) -> str:
    return "-".join(map(str, case))


@pytest.fixture(scope="module", params=CASES, ids=case_id)
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject.of(*request.param)


def misuses(name: str, value: Tensor) -> Iterator[tuple[str, Any]]:
    """What may stand in the place of an argument: (how it is called, what it is)."""
    for label, change in (MISUSES | (IDS if value.dtype is torch.int32 else {})).items():
        yield label, change(value)


def fault(call: Callable[[], Tensor], right: Callable[[Tensor], None], names: set[str]) -> str | None:
    """What is wrong with a call; None if it raised a MoEError that names one of the arguments, or is right."""
    try:
        result = call()
    except MoEError as error:
        text = str(error)
        return None if any(name in text for name in names) else f"the error names none of {sorted(names)}: {text}"
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error)[:300]}"
    try:
        right(result)
    except Exception as error:
        return f"is accepted, but {type(error).__name__}: {str(error)[:300]}"
    return None


def names_of(changed: set[str]) -> set[str]:
    """Names that an error may have: another number of tokens shows in what goes with them."""
    beside = {"topk_weights", "topk_ids", "router_logits", "adapter_ids", "output"}
    return changed | (beside if "hidden_states" in changed else set())


def calls(
    good: dict[str, Any], call: Callable[..., Tensor], check: Callable[[Tensor, dict[str, Any]], None]
) -> Iterator[str]:
    """The faults of ``call`` with each argument misused in each way."""
    for name, value in good.items():
        for label, other in misuses(name, value):
            given = good | {name: other}

            wrong = fault(partial(call, **given), partial(check, given=given), names_of({name}))
            if wrong:
                yield f"{name}, {label}: {wrong}"


def test_calls_of_a_kernel(subject: Subject) -> None:
    found = list(calls(subject.arguments, subject.layer.kernel.apply, subject.check))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("subject", CASES[-4:], ids=case_id, indirect=True)
def test_calls_of_a_layer(subject: Subject) -> None:
    good = {name: value for name, value in subject.arguments.items() if name not in ("expert_map", "output")}
    found = list(calls(good, subject.layer, subject.check))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("subject", CASES[-4:], ids=case_id, indirect=True)
def test_routing_of_a_layer(subject: Subject) -> None:
    config, layer = subject.layer.config, subject.layer
    logits = torch.randn(TOKENS, config.num_experts, generator=torch.Generator().manual_seed(5))

    def right(output: Tensor, given: dict[str, Any]) -> None:
        x, others = given["hidden_states"], given["router_logits"]
        if others is None:  # the layer's own router says them
            others = layer.router_logits(plain(x).view(TOKENS, config.hidden_size))
        topk_weights, topk_ids = layer.route(plain(others))
        subject.check(output, {"hidden_states": x, "topk_weights": topk_weights, "topk_ids": topk_ids})

    good = {"hidden_states": subject.arguments["hidden_states"], "router_logits": logits}
    found = list(calls(good, layer, right))
    assert not found, "\n".join(found)


def test_calls_with_several_faults(subject: Subject, moe_fuzz: range) -> None:
    found = []
    for seed in moe_fuzz:
        rng = random.Random(seed)
        given, told = dict(subject.arguments), []
        for name in rng.sample(list(given), rng.choice((2, 2, 3))):
            label, given[name] = rng.choice(list(misuses(name, given[name])))
            told.append(f"{name}, {label}")
        changed = {text.partition(",")[0] for text in told}
        attempt, right = partial(subject.layer.kernel.apply, **given), partial(subject.check, given=given)
        wrong = fault(attempt, right, names_of(changed))
        if wrong:
            found.append(f"seed {seed}: {'; '.join(told)}: {wrong}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("kind", [*some_kinds(2), PERMUTED], ids=str)
def test_weights_of_a_layer(kind: Kind) -> None:
    config = kind.config(has_bias=True)
    weights = kind.weights(config)
    given = Subject.of(kind, "standard").arguments
    routed = {name: given[name] for name in ("topk_weights", "topk_ids")}
    unchanged = expected_output(given["hidden_states"], weights, config, **routed)

    def attempt(name: str, other: Any) -> Tensor:
        changed: dict[str, Any] = {name: other}
        layer = FusedMoELayer.from_weights(kind.scheme, config, replace(weights, **changed))
        output: Tensor = layer(given["hidden_states"], **routed)
        return output

    def right(name: str, other: Tensor, output: Tensor) -> None:
        expected = unchanged
        changed: dict[str, Any] = {name: plain(other)}
        if not same_bits(getattr(weights, name), changed[name]):
            expected = expected_output(given["hidden_states"], replace(weights, **changed), config, **routed)
        expected.compare(output, "the result")

    found = []
    for name, tensor in weights.tensors():
        for label, other in misuses(name, tensor):
            # zero points lie as scales do
            names = {name, name.replace("_scale", "_zero_point")}
            wrong = fault(partial(attempt, name, other), partial(right, name, other), names)
            if wrong:
                found.append(f"{name}, {label}: {wrong}")
    assert not found, "\n".join(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint."""
    made = tmp_path_factory.mktemp("checkpoint")
    scheme = registry().scheme(registry().scheme_names()[0])
    assert scheme.quickstart is not None
    scheme.write_quickstart(made)
    return made


ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**31,
    10**30,
    1.5,
    float("nan"),
    "",
    "nonsense",
    b"x",
    [],
    [1],
    {},
    object(),
    torch,
)


@pytest.mark.parametrize(
    "name",
    ["layer", "device", "backend", "dtype", "experts", "quantize", "activation_key", "max_loras", "max_lora_rank"],
)
def test_loading_with_odd_values(name: str, folder: Path) -> None:
    found = []
    for value in (*ODD, torch.device("meta")):
        given: dict[str, Any] = {"device": "cpu", name: value}
        if name == "max_lora_rank":
            given["max_loras"] = 1
        try:
            layer = load_layer(folder, **given)
        except MoEError as error:
            what = str(error)
            if name not in what and repr(value) not in what and str(value) not in what:
                found.append(f"{name}={value!r}: the error names neither: {what}")
        except Exception as error:
            found.append(f"{name}={value!r}: raises {type(error).__name__}: {str(error)[:200]}")
        else:
            if value is not None and not (name == "experts" and list(value) == [1]):
                found.append(f"{name}={value!r}: is taken")
            # no device is that which is best here
            x = torch.zeros(1, layer.config.hidden_size, dtype=layer.config.dtype, device=layer.weights.device)
            assert layer(x).shape == x.shape
    assert not found, "\n".join(found)
