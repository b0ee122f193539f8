"""Regression tests for silent faults of other fused MoE layers, for a scheme's backends.

Every class runs every pair of keys on the device that it is made for. GPU kernels in Triton's interpreter are left to
the conformance kit, which selects its cases for an interpreter that takes seconds per case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from moe_core.interface.experts import FusedMoEExperts
from moe_core.layer.layer import FusedMoELayer
from moe_core.reference.fused_moe import fused_moe_reference
from moe_core.selection.registry import registry
from moe_core.spec.activation import ActivationParams, MoEActivation
from moe_core.spec.config import FusedMoEActivationFormat, FusedMoEConfig
from moe_core.spec.environment import Environment
from moe_core.spec.quant_key import QuantKey
from moe_core.testing.cases import Case
from moe_core.testing.conformance import place_for
from moe_core.testing.harness import Place, Problem, call, make_kernel, make_problem, one_thread, same_bits
from moe_core.testing.mistakes import compare
from moe_core.testing.requantized import computed_with
from torch import Tensor

Keys = tuple[QuantKey | None, QuantKey | None]
Test = TypeVar("Test", bound=Callable[..., None])

#: tokens of a layer that is compared with the reference, and of a layer whose error is compared with another error
_FEW, _MANY = 5, 24


@dataclass(frozen=True)
class Run:
    """An experts class, where it runs, and a layer that it claims to run.

    Attributes:
        backend: Name of the backend.
        experts: The experts class.
        place: Where it runs.
        case: The layer.
    """

    backend: str
    experts: type[FusedMoEExperts]
    place: Place
    case: Case

    @property
    def id(self) -> str:
        """Name of the class and the case."""
        return f"{self.experts.__name__}-{self.case.id.removeprefix('values-')}"


@dataclass(frozen=True)
class Layers:
    """Layers that a test runs on.

    Attributes:
        changes: Fields of :attr:`KnownFaultTests.layer` to replace.
        quantized: Whether to use quantized activations only.
        modules: Whether to use only experts that a FusedMoELayer accepts.
    """

    changes: dict[str, Any]
    quantized: bool = False
    modules: bool = False


def on(*, quantized: bool = False, modules: bool = False, **changes: Any) -> Callable[[Test], Test]:
    """Run a test on :class:`Layers`, for every class and pair of keys that accepts them.

    Several such decorators run the test on the layers of each.

    Args:
        quantized: Whether to use quantized activations only.
        modules: Whether to use only experts that a FusedMoELayer accepts.
        **changes: Fields of :attr:`KnownFaultTests.layer` to replace.

    Returns:
        The decorator.
    """

    def mark(test: Test) -> Test:
        test.__dict__.setdefault("layers", []).append(Layers(changes, quantized, modules))
        return test

    return mark


class KnownFaultTests:
    """Base of a test class: set ``scheme`` and ``keys``.

    Experts that route internally are left to the conformance kit.

    Attributes:
        scheme: Name of the scheme.
        keys: Pairs of weight and activation keys; None stands for 16-bit activations.
        layer: Configuration that the tests start from.
    """

    scheme: ClassVar[str]
    keys: ClassVar[Sequence[Keys]]
    layer: ClassVar[FusedMoEConfig] = FusedMoEConfig(num_experts=4, top_k=2, hidden_size=256, intermediate_size=128)

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Parametrize tests by experts class, pair of keys and layer (pytest hook)."""
        layers: list[Layers] = getattr(metafunc.function, "layers", [])
        if "run" in metafunc.fixturenames and layers:
            runs = [run for each in layers for run in cls.runs(each)]
            metafunc.parametrize("run", runs, ids=[run.id for run in runs])

    @classmethod
    def runs(cls, layers: Layers) -> Iterator[Run]:
        """Yield the runs that are possible on this machine.

        Args:
            layers: Layers that the test runs on.

        Yields:
            The runs.
        """
        here = Environment.current()
        tokens = _MANY if layers.quantized else _FEW
        for backend in registry().oracle(cls.scheme).table():
            for experts in backend.load():
                place = place_for(experts.claims)
                missing = any(here.reason_against(item) for item in experts.claims.requires)
                if place is None or place.interpreted or missing or experts.is_monolithic:
                    continue
                config = replace(cls.layer, **layers.changes)
                if FusedMoEActivationFormat.STANDARD not in experts.claims.formats:
                    if layers.modules:
                        continue
                    batched = FusedMoEActivationFormat.BATCHED
                    config = replace(config, activation_format=batched, max_num_tokens=tokens)
                for keys in cls.keys:
                    if layers.quantized and keys[1] is None:
                        continue
                    if not experts.unsupported_reasons(config, *keys, place.target, here):
                        yield Run(backend.name, experts, place, Case("values", config, *keys, tokens))

    @classmethod
    def check(cls, run: Run) -> tuple[Problem, Tensor]:
        """Run the layer and compare it with the reference.

        Args:
            run: The run.

        Returns:
            (tensors of the case, output ``[M, K]``).

        Raises:
            AssertionError: The output is wrong.
        """
        problem = make_problem(run.case, run.place.device)
        y = call(make_kernel(run.experts, problem, run.place), problem)
        compare(run.experts, problem, y, run.place)
        return problem, y

    @on(has_bias=True)
    def test_biases_reach_the_result(self, run: Run) -> None:
        """Fault: biases were accepted, but not added, or added in another layout's row order."""
        self.check(run)

    @on(activation_params=ActivationParams(limit=0.5))
    def test_clamp_limits_reach_the_result(self, run: Run) -> None:
        """Fault: the limit of the config was not passed on, or replaced by the usual one."""
        self.check(run)

    @on(hidden_size=512, intermediate_size=64)
    def test_w13_has_the_groups_of_the_hidden_size(self, run: Run) -> None:
        """Fault: scales of w13 were laid out by the intermediate size.

        There was one group if that size is at most one group. Tensor parallelism makes such layers: shards of experts
        with a group or less.
        """
        self.check(run)

    @on(activation=MoEActivation.RELU2_NO_MUL, hidden_size=264, intermediate_size=136)
    @on(activation=MoEActivation.SILU_NO_MUL, hidden_size=320, intermediate_size=200)
    def test_layers_without_a_gate_in_sizes_that_need_padding(self, run: Run) -> None:
        """Fault: w13 was padded as two halves, or taken for gate and up.

        Without a gate it is a single matrix of N rows.
        """
        self.check(run)

    @on(num_experts=8, num_local_experts=3)
    def test_experts_of_this_rank_keep_what_is_theirs(self, run: Run) -> None:
        """Fault: scales, zero points or groups were indexed by global instead of local expert ids."""
        self.check(run)

    @on(is_lora_enabled=True, max_loras=2, max_lora_rank=8)
    def test_adapters_that_are_claimed_are_applied(self, run: Run) -> None:
        """Fault: adapters were claimed by a base class and ignored."""
        self.check(run)

    @on(quantized=True)
    def test_activations_are_quantized_where_asked(self, run: Run) -> None:
        """Fault: a weight-only backend was chosen, with the result of 16-bit activations.

        In a space of that many dimensions, implementation errors do not point from one result to the other by chance.
        """
        problem, y = self.check(run)
        computed = computed_with(run.experts, problem, run.place)
        found, exact = y.cpu().double(), computed.expected(run.place).exact.cpu()
        with one_thread():
            plain = fused_moe_reference(
                computed.inputs.x.cpu(),
                computed.weights.to("cpu"),
                run.case.config,
                topk_weights=computed.inputs.topk_weights.cpu(),
                topk_ids=computed.inputs.topk_ids.cpu(),
                quantize_activations=False,
            )
        to_asked, to_plain = float((found - exact).norm()), float((found - plain).norm())
        if not to_asked < to_plain:
            raise AssertionError(f"{to_asked:.3g} from what was asked for, {to_plain:.3g} from 16-bit activations")

    @on(modules=True)
    def test_reloading_gives_the_new_layer_in_place(self, run: Run) -> None:
        """Fault: reloading missed tensors that belong to the weights, or captured CUDA graphs.

        This tests the class that the backend selects for the layer. The conformance kit reloads kernels of every class.
        """
        case, device = run.case, run.place.device
        old, new = (make_problem(case, device, variant=variant) for variant in (0, 1))
        oracle = registry().oracle(self.scheme)
        layer, fresh = (
            FusedMoELayer.from_weights(oracle, case.config, problem.weights, backend=run.backend, copy=True)
            for problem in (old, new)
        )
        arguments: dict[str, Any] = {"topk_weights": new.inputs.topk_weights, "topk_ids": new.inputs.topk_ids}
        # State that a backend caches in the first call must not outlive the weights.
        layer(new.inputs.x, **arguments)
        graph, captured = None, torch.empty_like(new.inputs.x)
        if device.type == "cuda" and run.experts.claims.cuda_graph:
            layer.kernel.apply(new.inputs.x, output=captured, **arguments)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                layer.kernel.apply(new.inputs.x, output=captured, **arguments)
        pointers = [tensor.data_ptr() for _, tensor in layer.weights.tensors()]
        for problem in (new, old, new):
            layer.reload(problem.weights)
        if [tensor.data_ptr() for _, tensor in layer.weights.tensors()] != pointers:
            raise AssertionError("reloading moved a tensor: captured graphs would read the old memory")
        expected = fresh(new.inputs.x, **arguments)
        if not same_bits(layer(new.inputs.x, **arguments), expected):
            raise AssertionError("after reloading, the result is not that of a fresh layer")
        if graph is not None:
            captured.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            if not same_bits(captured, expected):
                raise AssertionError("a captured graph does not see the new weights")
