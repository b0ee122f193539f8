"""Small layers of every class of experts whose calls are replayed, and what happens to them while they are called."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from moe_core import FusedMoEActivationFormat, FusedMoEConfig, FusedMoEKernel, registry
from moe_core.interface.claims import expand_key
from moe_core.interface.experts import FusedMoEExperts
from moe_core.interface.recordable import RecordableExperts
from moe_core.kernels.launch.launch import Launch, observe
from moe_core.spec.environment import Environment
from moe_core.spec.workspace import Workspace
from moe_core.testing.cases import Case
from moe_core.testing.conformance import place_for
from moe_core.testing.data import Inputs, make_inputs
from moe_core.testing.harness import make_kernel, make_problem
from torch import Tensor

#: a layer that the interpreter computes quickly
SMALL = FusedMoEConfig(num_experts=4, top_k=2, hidden_size=128, intermediate_size=128)


def replayed() -> list[Any]:
    """Classes that only launch kernels, and run here."""
    environment, found = Environment.current(), {}
    for scheme in registry().scheme_names():
        for backend in registry().oracle(scheme).table():
            for experts in backend.load():
                recordable = issubclass(experts, RecordableExperts)
                if not recordable or FusedMoEActivationFormat.STANDARD not in experts.claims.formats:
                    continue
                if not any(environment.reason_against(requirement) for requirement in experts.claims.requires):
                    found[f"{scheme}-{experts.__name__}"] = experts
    return [pytest.param(experts, id=name) for name, experts in found.items()]


def case_of(
    experts: type[FusedMoEExperts], device: torch.device, tokens: int, config: FusedMoEConfig = SMALL
) -> Case | None:
    """A layer that the class accepts here."""
    place = place_for(experts.claims, device.type)
    for weights, activations in experts.claims.keys:
        for weight_key in expand_key(weights):
            for activation_key in expand_key(activations):
                arguments = {"weight_key": weight_key, "activation_key": activation_key}
                if (
                    place is not None
                    and experts.is_supported_config(
                        config, **arguments, device=place.target, environment=Environment.current()
                    )[0]
                ):
                    return Case("values", config, **arguments, tokens=tokens)
    return None


def called(
    device: torch.device, experts: type[FusedMoEExperts], tokens: int, config: FusedMoEConfig = SMALL
) -> tuple[FusedMoEKernel, Inputs]:
    """A layer and what it may be called with."""
    case, place = case_of(experts, device, tokens, config), place_for(experts.claims, device.type)
    if case is None or place is None:
        pytest.skip("runs no such layer on this machine")
    problem = make_problem(case, device)
    kernel = make_kernel(experts, problem, place)
    kernel.workspace = Workspace(device)  # descriptors hold its address
    return kernel, problem.inputs


class MovingLayers:
    """Layers of a class that share a workspace, and whose weights move, sleep, wake and change between calls.

    Every call is compared with what the layer returned while its weights were where they had been made.
    """

    def __init__(
        self,
        device: torch.device,
        experts: type[FusedMoEExperts],
        layers: int,
        tokens: tuple[int, ...],
        config: FusedMoEConfig = SMALL,
    ) -> None:
        self.kernels = [called(device, experts, 1, config)[0] for _ in range(layers)]
        self.workspace = Workspace(device)
        self.inputs = {number: make_inputs(config, number, seed=number).to(device) for number in tokens}
        self._kept: list[Any] = []
        #: by layer: its weights before and after a reload
        self._versions: list[list[dict[str, Tensor]]] = []
        self._expected: list[list[dict[int, Tensor]]] = []
        for number, kernel in enumerate(self.kernels):
            kernel.weights = kernel.weights.apart_from(kernel.weights)  # type: ignore[arg-type]
            kernel.workspace = self.workspace
            self._versions.append([])
            self._expected.append([])
            for version in (0, 1):
                for _, tensor in kernel.weights.tensors():
                    tensor.copy_(tensor.view(torch.uint8).roll(number + version, 0).view(tensor.dtype))
                self._versions[-1].append({name: tensor.clone() for name, tensor in kernel.weights.tensors()})
                self._expected[-1].append({count: self._result(kernel, count) for count in tokens})
        self._present = [1] * layers

    def forget(self) -> None:
        """No layer has records of what was called so far."""
        for kernel in self.kernels:
            kernel._register()

    def _result(self, kernel: FusedMoEKernel, tokens: int) -> Tensor:
        given = self.inputs[tokens]
        return kernel.apply(given.x, topk_weights=given.topk_weights, topk_ids=given.topk_ids)

    def call(self, layer: int, tokens: int) -> bool:
        """Whether the call was replayed; an AssertionError where its result is wrong."""
        launched: list[Launch] = []
        with observe(launched.append):
            result = self._result(self.kernels[layer], tokens)
        assert torch.equal(result, self._expected[layer][self._present[layer]][tokens]), (layer, tokens)
        return not launched

    def act(self, action: str, layer: int) -> None:
        """What an engine does between calls; memory that the weights leave is somebody else's."""
        kernel = self.kernels[layer]
        tensors = [tensor for _, tensor in kernel.weights.tensors()]
        if action == "move":
            self._into_new_storage(tensors)
        elif action == "move one":
            self._into_new_storage([random.Random(len(self._kept)).choice(tensors)])
        elif action == "data":
            for tensor in tensors:
                old, tensor.data = tensor.data, tensor.data.clone()
                self._spoil(old)
        elif action == "sleep and wake":
            kept = {name: tensor.clone() for name, tensor in kernel.weights.tensors()}
            storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
            sizes = [storage.nbytes() for storage in storages.values()]
            for storage in storages.values():
                storage.resize_(0)
            for nbytes in sizes:
                self._kept.append(torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=tensors[0].device))
            for storage, nbytes in zip(storages.values(), sizes, strict=True):
                storage.resize_(nbytes)
            self._write(kernel, kept)
        elif action == "reload":
            self._present[layer] = 1 - self._present[layer]
            self._write(kernel, self._versions[layer][self._present[layer]])
        elif action == "grow":
            self.workspace.reserve(self.workspace.nbytes + 4096)
        elif action == "replace workspace":
            self.workspace = Workspace(kernel.weights.device)
            for each in self.kernels:
                each.workspace = self.workspace

    @staticmethod
    def _write(kernel: FusedMoEKernel, values: Mapping[str, Tensor]) -> None:
        for name, tensor in kernel.weights.tensors():
            tensor.copy_(values[name])

    def _spoil(self, memory: Tensor) -> None:
        values = memory.contiguous().clone()
        memory.copy_(values.view(torch.uint8).bitwise_not().view(values.dtype).view(values.shape))
        self._kept.append(memory)

    def _into_new_storage(self, tensors: list[Tensor]) -> None:
        """As a move of whole storages: tensors that share one go on sharing it."""
        new: dict[int, tuple[Any, Any]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            new.setdefault(storage.data_ptr(), (storage, storage.clone()))
        for tensor in tensors:
            other = new[tensor.untyped_storage().data_ptr()][1]
            tensor.set_(other, tensor.storage_offset(), tensor.shape, tensor.stride())
        for old, _ in new.values():
            old.fill_(0xFF)
            self._kept.append(old)


#: what happens between calls, the usual first
ACTIONS = ("move", "data", "sleep and wake", "reload", "grow", "move one", "replace workspace")


def random_sequence(layers: MovingLayers, rng: random.Random, steps: int) -> None:
    """Calls of all kinds in random order, with something between many of them; at the end they are replayed."""
    numbers, tokens = range(len(layers.kernels)), list(layers.inputs)
    for _ in range(steps):
        if rng.random() < 0.5:
            layers.act(rng.choice(ACTIONS), rng.choice(numbers))
        layers.call(rng.choice(numbers), rng.choice(tokens))
    for _ in range(2):
        layers.call(numbers[-1], tokens[0])
    assert layers.call(numbers[-1], tokens[0])
