"""Tensors and kernel of a conformance case, and calls with guarded, poisoned buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_core.interface.claims import Claims
from moe_core.interface.experts import FusedMoEExperts
from moe_core.interface.prepare_finalize import FusedMoEPrepareAndFinalizeModular, Prepared
from moe_core.parallel.prepare_finalize.batched import BatchedPrepareAndFinalize
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.reference.tolerance import Expected, expected_output, yardstick_dtype
from moe_core.runtime.kernel import FusedMoEKernel
from moe_core.spec.config import FusedMoEActivationFormat
from moe_core.spec.device import DeviceInfo
from moe_core.spec.lora import LoRA, LoRAWeights
from moe_core.spec.routing import route
from moe_core.spec.weights import MoEWeights
from moe_core.spec.workspace import Workspace, workspace_nbytes
from moe_core.testing.cases import Case
from moe_core.testing.data import Inputs, make_inputs, make_lora, make_weights

#: bytes that fill workspaces and outputs before a call; as floats they are NaN, and huge but finite
_POISON = bytes([0xFF] * 64 + [0x7B] * 64)
#: target devices of experts on a machine without one: in the Triton interpreter, or for
#: conversion only
PRETENDED = ("sm90", "sm100", "sm89", "sm80", "sm120", "gfx950", "gfx942")
_GUARD = 512  # guard bytes around workspace and output that must stay unchanged


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread for the reference's small tensors.

    On a busy machine, thread synchronization would dominate their cost.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Place:
    """Where a case runs.

    Attributes:
        device: Device of the tensors.
        target: Device that the experts are created for.
    """

    device: torch.device
    target: DeviceInfo

    @property
    def interpreted(self) -> bool:
        """Whether GPU kernels run in the Triton interpreter."""
        return self.device.type == "cpu" and self.target.kind != "cpu"


@dataclass(frozen=True, eq=False)
class Problem:
    """Tensors of a case, on the device.

    Attributes:
        case: The case.
        weights: Canonical weights.
        inputs: Hidden states and routing.
        router_logits: ``[M, E]``, for monolithic experts.
        correction_bias: ``[E]``, for monolithic experts.
        lora: Adapters, for experts that apply them.
    """

    case: Case
    weights: MoEWeights
    inputs: Inputs
    router_logits: Tensor | None = None
    correction_bias: Tensor | None = None
    lora: LoRAWeights | None = None

    def expected(self, place: Place, claims: Claims | None = None) -> Expected:
        """Return the reference output with its bounds.

        Args:
            place: Where the case runs.
            claims: Claims of the backend; None for one that rounds no more than it must.

        Returns:
            The expected output.
        """
        inputs, config = self.inputs, self.case.config
        with one_thread():
            return expected_output(
                inputs.x,
                self.weights,
                config,
                topk_weights=inputs.topk_weights,
                topk_ids=inputs.topk_ids,
                expert_map=inputs.expert_map,
                compute_dtype=yardstick_dtype(config.dtype, place.device, self.case.activation_key),
                rounds_products=claims is not None and claims.rounds_products,
                rounds_scales=claims is not None and claims.rounds_scales,
                lora=self.applied,
            )

    @property
    def applied(self) -> LoRA | None:
        """The adapters with each token's adapter id, or None."""
        ids = self.inputs.adapter_ids
        return None if self.lora is None or ids is None else LoRA(self.lora, ids)

    def only(self, rows: slice | list[int]) -> Problem:
        """Return the same layer with some of the tokens.

        Args:
            rows: Slice or indices of the tokens.

        Returns:
            The problem with these tokens.
        """
        given = self.inputs
        inputs = replace(
            given,
            x=given.x[rows],
            topk_weights=given.topk_weights[rows],
            topk_ids=given.topk_ids[rows],
            adapter_ids=None if given.adapter_ids is None else given.adapter_ids[rows],
        )
        logits = None if self.router_logits is None else self.router_logits[rows]
        return replace(self, inputs=inputs, router_logits=logits)

    def arguments(self) -> dict[str, Tensor | None]:
        """Call arguments other than the hidden states, by name."""
        if self.router_logits is not None:
            return {
                "router_logits": self.router_logits,
                "correction_bias": self.correction_bias,
                "expert_map": self.inputs.expert_map,
            }
        return {
            "topk_weights": self.inputs.topk_weights,
            "topk_ids": self.inputs.topk_ids,
            "expert_map": self.inputs.expert_map,
            "adapter_ids": self.inputs.adapter_ids,
        }


def make_problem(case: Case, device: torch.device, *, variant: int = 0) -> Problem:
    """Make the tensors of a case.

    Args:
        case: The case.
        device: Device of the tensors.
        variant: Another number gives other inputs and weights of the same shapes, with the same expert map.

    Returns:
        The tensors.
    """
    config = case.config
    seed = case.seed + 7919 * variant
    weights = make_weights(config, case.weight_key, case.activation_key, seed=seed).to(device)
    inputs = make_inputs(config, case.tokens, seed=seed, routing=case.routing, ids_dtype=case.ids_dtype)
    if variant:
        same = make_inputs(config, case.tokens, seed=case.seed, routing=case.routing, ids_dtype=case.ids_dtype)
        inputs = replace(inputs, expert_map=same.expert_map)
    inputs = inputs.to(device)
    logits = bias = None
    if config.routing is not None:
        logits, bias = _logits(case, seed)
        logits, bias = logits.to(device), None if bias is None else bias.to(device)
        topk_weights, topk_ids = route(logits, top_k=config.top_k, config=config.routing, correction_bias=bias)
        inputs = replace(inputs, topk_weights=topk_weights, topk_ids=topk_ids)
    lora = None
    if config.is_lora_enabled:
        lora = make_lora(config, seed=seed).to(device)
    return Problem(case, weights, inputs.strided() if case.strided else inputs, logits, bias, lora)


def _logits(case: Case, seed: int) -> tuple[Tensor, Tensor | None]:
    """Router logits that are well separated, so that rounding cannot change the selection.

    They are separated in bf16 too.
    """
    config = case.config
    generator = torch.Generator().manual_seed(seed + 1)
    order = torch.rand(case.tokens, config.num_experts, generator=generator).argsort(dim=1).float()
    logits = 4 * (order / config.num_experts - 0.4)
    bias = None
    if config.routing is not None and config.routing.has_correction_bias:
        bias = 0.05 * torch.randn(config.num_experts, generator=generator)
    return logits, bias


def make_instance(experts: type[FusedMoEExperts], case: Case, place: Place) -> FusedMoEExperts:
    """Instantiate the experts of a case.

    Args:
        experts: Experts class.
        case: The case.
        place: Where it runs.

    Returns:
        The instance.
    """
    return experts(case.config, weight_key=case.weight_key, activation_key=case.activation_key, device=place.target)


def make_kernel(experts: type[FusedMoEExperts], problem: Problem, place: Place) -> FusedMoEKernel:
    """Make the kernel of a case with freshly converted weights.

    Args:
        experts: Experts class.
        problem: The case's tensors.
        place: Where it runs.

    Returns:
        The kernel. In the batched format, unused rows are poisoned.
    """
    case = problem.case
    instance = make_instance(experts, case, place)
    weights = instance.convert(problem.weights)
    movement: FusedMoEPrepareAndFinalizeModular | None = None
    if not instance.is_monolithic:
        batched = case.config.activation_format is FusedMoEActivationFormat.BATCHED
        movement = PoisonedBatches(case.config) if batched else default_prepare_finalize(case.config)
    return FusedMoEKernel(instance, weights, movement, lora=problem.lora)


class PoisonedBatches(BatchedPrepareAndFinalize):
    """Batched prepare/finalize whose unused rows hold NaN and huge values.

    Buffers that an all-to-all between ranks fills may hold such values.
    """

    def prepare(self, *arguments: Any, **named: Any) -> Prepared:
        prepared = super().prepare(*arguments, **named)
        x, expert_tokens = prepared.hidden_states, prepared.expert_tokens
        if expert_tokens is not None and expert_tokens.expert_num_tokens is not None:
            unused = torch.arange(x.shape[1], device=x.device) >= expert_tokens.expert_num_tokens[:, None]
            for tensor in (x, prepared.scale):
                if tensor is not None and tensor.dim() == 3:
                    _fill(tensor, unused[..., None])
        return prepared


def _fill(tensor: Tensor, where: Tensor) -> None:
    """Write NaN to even columns and the largest finite value to odd columns ``where`` True.

    One-byte elements get the largest value of seven bits, 0x7F, which is NaN in e4m3.
    """
    if tensor.element_size() == 1:
        tensor.view(torch.uint8).masked_fill_(where, 0x7F)
    else:
        tensor[..., 0::2].masked_fill_(where, float("nan"))
        tensor[..., 1::2].masked_fill_(where, torch.finfo(tensor.dtype).max)


def call(kernel: FusedMoEKernel, problem: Problem, output: Tensor | None = None) -> Tensor:
    """Call the kernel once with the problem's arguments.

    Args:
        kernel: The kernel.
        problem: The case's tensors.
        output: Output ``[M, K]``; allocated if None.

    Returns:
        The output ``[M, K]``.
    """
    inputs = problem.inputs
    if problem.router_logits is not None:
        return kernel.apply_monolithic(
            inputs.x,
            router_logits=problem.router_logits,
            correction_bias=problem.correction_bias,
            expert_map=inputs.expert_map,
            output=output,
        )
    return kernel.apply(
        inputs.x,
        topk_weights=inputs.topk_weights,
        topk_ids=inputs.topk_ids,
        expert_map=inputs.expert_map,
        adapter_ids=inputs.adapter_ids,
        output=output,
    )


def _poison(nbytes: int, device: torch.device) -> Tensor:
    pattern = torch.frombuffer(bytearray(_POISON), dtype=torch.uint8)
    return pattern.repeat(-(-nbytes // len(_POISON)))[:nbytes].to(device)


def watched_call(kernel: FusedMoEKernel, problem: Problem) -> Tensor:
    """Call the kernel once with a poisoned output and workspace of exactly the stated size.

    Args:
        kernel: The kernel.
        problem: The case's tensors.

    Returns:
        A copy of the output ``[M, K]``.

    Raises:
        AssertionError: The call wrote outside of a buffer.
    """
    x, config = problem.inputs.x, kernel.config
    memory = _poison(workspace_nbytes(kernel.workspaces(x.shape[0])) + 2 * _GUARD, x.device)
    rows = max(1, _GUARD // config.hidden_size)
    row_bytes = config.hidden_size * config.dtype.itemsize
    surrounding = _poison((x.shape[0] + 2 * rows) * row_bytes, x.device)
    output = surrounding.view(config.dtype).view(-1, config.hidden_size)[rows : rows + x.shape[0]]
    kernel.workspace = Workspace(x.device, memory[_GUARD:-_GUARD])
    try:
        call(kernel, problem, output)
    finally:
        kernel.workspace = None
    for buffer, guard, what in ((memory, _GUARD, "the workspace"), (surrounding, rows * row_bytes, "the output")):
        before = _poison(len(buffer), x.device)
        if not torch.equal(buffer[-guard:], before[-guard:]):
            raise AssertionError(f"bytes behind {what} were written; workspaces() must state all that apply uses")
        if not torch.equal(buffer[:guard], before[:guard]):
            raise AssertionError(f"bytes before {what} were written")
    return output.clone()


def snapshot(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Copy the tensors.

    Args:
        tensors: Tensors by name; None is skipped.

    Returns:
        The copies by name.
    """
    return {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}


def changed(tensors: dict[str, Tensor | None], before: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors whose bits have changed.

    Args:
        tensors: Current tensors by name.
        before: Result of :func:`snapshot`.

    Returns:
        The names.
    """
    return [name for name, old in before.items() if not same_bits(tensors[name], old)]


def same_bits(a: Tensor | None, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; NaN equals itself.

    Args:
        a: First tensor; None equals nothing.
        b: Second tensor.

    Returns:
        True if they do.
    """
    if a is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.numel():
        return True
    # Copied, because a contiguous tensor may have any stride in a dimension of size 1.
    plain = [torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t).flatten() for t in (a, b)]
    return torch.equal(*(t.view(torch.uint8) for t in plain))
