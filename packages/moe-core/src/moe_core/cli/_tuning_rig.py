"""A layer on a GPU whose launch configurations are timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_core.cli._compile_pool import CompilePool
from moe_core.cli._layers import INPUTS, Layer, random_call
from moe_core.cli._timing import measure
from moe_core.kernels.experts.grouped import GroupedExperts
from moe_core.kernels.gemm.heuristics.tuned import Tuned, TunedRange
from moe_core.kernels.launch.compile_ahead import compile_in_threads, distinct
from moe_core.kernels.launch.current_device import current
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.runtime.call_launches import call_launches
from moe_core.runtime.kernel import FusedMoEKernel
from moe_core.selection.oracle import Oracle
from moe_core.spec.workspace import Workspace

if TYPE_CHECKING:
    from moe_core.kernels.launch.launch import Launch
    from moe_core.kernels.tuning.limits import Plan
    from moe_core.selection.report import Selection

#: seconds of replays per configuration
BUDGET = 0.03
#: allowed error relative to the norm of the built-in plan's result: rounding of 8-bit activations may differ by a few
#: per cent, while a wrong kernel is off by 100 %
WRONG = 0.1


class LayerOnGpu:
    """Implementation of :class:`moe_core.kernels.tuning.search.Rig`."""

    def __init__(self, layer: Layer, selection: Selection, device: torch.device, most: int) -> None:
        # Ignore an earlier tuning profile.
        self.selection = replace(selection, report=replace(selection.report, tuning=None))
        self.config, self.device = layer.config, device
        experts = Oracle.make_experts(self.selection)
        if not isinstance(experts, GroupedExperts):
            raise TypeError(f"{type(experts).__name__} selects its launches itself, expected a GroupedExperts")
        self.experts = experts
        self.weights = experts.convert(layer.weights())
        self.workspace = Workspace(device)
        self.workspace.reserve(self._kernel(None).workspace_nbytes(most))
        self._calls: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
        self._expected: dict[int, Tensor] = {}
        self._pool = CompilePool(lambda trial: self._launches(*trial), selection.device)

    def __enter__(self) -> LayerOnGpu:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def default(self, tokens: int) -> Plan:
        plan = self.experts.launch_plan(self.weights, tokens)
        gemv = plan.gemv
        return plan.tiles if gemv is None or not gemv[0].reads(self._inputs(tokens)[0][0]) else gemv[1]

    def prepare(self, trials: Sequence[tuple[int, Plan]]) -> list[bool]:
        compiles = self._pool.compile(trials)
        with current(self.device):
            found = [self._launches(*trial) if fits else [] for trial, fits in zip(trials, compiles, strict=True)]
            wanted = distinct(one for launches in found for one in launches)
            # The pool's results are in Triton's disk cache.
            kernels = compile_in_threads(wanted, ignore_errors=True)
            fails = {one.compiled_for() for one, kernel in zip(wanted, kernels, strict=True) if not _loads(kernel)}
        return [bool(launches) and not any(one.compiled_for() in fails for one in launches) for launches in found]

    def seconds(self, tokens: int, plan: Plan) -> float:
        kernel, inputs = self._kernel(plan), self._inputs(tokens)
        calls = [lambda i=i: kernel.apply(i[0], topk_weights=i[1], topk_ids=i[2]) for i in inputs]
        try:
            if not self._is_right(tokens, calls[0]()):
                return float("inf")
            return measure(calls, self.device, graph=True, budget=BUDGET).median
        except Exception:  # A compiler or a launch may raise anything; the next configuration may work.
            return float("inf")

    def _is_right(self, tokens: int, found: Tensor) -> bool:
        if tokens not in self._expected:
            x, weights, ids = self._inputs(tokens)[0]
            self._expected[tokens] = self._kernel(None).apply(x, topk_weights=weights, topk_ids=ids)
        expected = self._expected[tokens].float()
        return bool((found.float() - expected).norm() <= WRONG * expected.norm())

    def _launches(self, tokens: int, plan: Plan) -> list[Launch]:
        """Return the launches of a call; empty if no kernel has such tiles."""
        try:
            return list(call_launches(self._kernel(plan), tokens))
        except Exception:  # Host code before a launch may raise anything.
            return []

    def _kernel(self, plan: Plan | None) -> FusedMoEKernel:
        """Return a separate kernel, which has recorded no launches of other plans."""
        experts = Oracle.make_experts(self.selection)
        if plan is not None:
            experts.tuned = Tuned((TunedRange(1, 2**31 - 1, plan),))  # type: ignore[attr-defined]
        return FusedMoEKernel(experts, self.weights, default_prepare_finalize(self.config), workspace=self.workspace)

    def _inputs(self, tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        if tokens not in self._calls:
            self._calls[tokens] = [random_call(self.config, tokens, self.device, seed) for seed in range(INPUTS)]
        return self._calls[tokens]


def _loads(kernel: object) -> bool:
    """Whether a compiled kernel fits the GPU's shared memory and registers."""
    try:
        return kernel is not None and kernel.run is not None  # type: ignore[attr-defined]
    except Exception:  # Triton raises OutOfResources, or the driver an error.
        return False
