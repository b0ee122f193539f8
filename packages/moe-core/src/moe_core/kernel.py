"""The modular kernel: prepare + experts + finalize as one call.

``apply`` checks its arguments, runs the three parts on the current stream and returns.  Under
``torch.compile`` the call becomes one opaque operator that only writes its output, so
that a model compiles with ``fullgraph=True``; eager calls bypass the operator, whose dispatch
would cost more than a small layer's launches.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_core.config import FusedMoEActivationFormat, FusedMoEConfig
from moe_core.errors import ConfigError, TensorError, check_dtype, check_shape
from moe_core.experts import (
    FusedMoEExperts,
    FusedMoEExpertsModular,
    FusedMoEExpertsMonolithic,
    output_shape,
)
from moe_core.lora import LoRA, LoRAWeights
from moe_core.prepare_finalize.base import (
    FusedMoEPrepareAndFinalizeModular,
    TopKWeightAndReduce,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceNoOP,
)
from moe_core.weights import KernelWeights
from moe_core.workspace import Workspace, WorkspaceSpec, workspace_nbytes

_ID_DTYPES = (torch.int32, torch.int64)


class FusedMoEKernel:
    """A layer that can run: experts, their weights, and the way tokens reach them.

    - modular experts: :meth:`apply` with ``topk_weights`` and ``topk_ids``
    - monolithic experts: :meth:`apply_monolithic` with ``router_logits``

    ``workspace`` may be shared between layers that run one after another.  ``lora``: places for adapters, where the
    config is enabled for them; :attr:`lora` may be set later too.
    """

    def __init__(
        self,
        experts: FusedMoEExperts,
        weights: KernelWeights,
        prepare_finalize: FusedMoEPrepareAndFinalizeModular | None = None,
        *,
        workspace: Workspace | None = None,
        lora: LoRAWeights | None = None,
    ) -> None:
        if isinstance(experts, FusedMoEExpertsModular):
            if prepare_finalize is None:
                raise ConfigError(f"{type(experts).__name__} is modular and needs prepare_finalize")
            if prepare_finalize.activation_format is not experts.activation_format:
                raise ConfigError(
                    f"{type(prepare_finalize).__name__} brings the {prepare_finalize.activation_format.value} format, "
                    f"{type(experts).__name__} takes {experts.activation_format.value}"
                )
        elif prepare_finalize is not None:
            raise ConfigError(f"{type(experts).__name__} is monolithic and takes no prepare_finalize")
        if experts.config.is_lora_enabled and prepare_finalize is not None and not prepare_finalize.lora:
            raise ConfigError(f"{type(prepare_finalize).__name__} does not carry the numbers of LoRA adapters")
        self.experts = experts
        self.weights = weights
        self.prepare_finalize = prepare_finalize
        self.workspace = workspace
        self.reduce: TopKWeightAndReduce = (
            TopKWeightAndReduceNoOP() if experts.claims.reduces else TopKWeightAndReduceContiguous()
        )
        self.lora = lora
        self._register()

    @property
    def config(self) -> FusedMoEConfig:
        return self.experts.config

    @property
    def lora(self) -> LoRAWeights | None:
        """The adapters of the layer; what is set must fit its config and device."""
        return self._lora

    @lora.setter
    def lora(self, weights: LoRAWeights | None) -> None:
        if weights is not None:
            weights.validate(self.config, self.weights.device)
        self._lora = weights

    @property
    def is_monolithic(self) -> bool:
        return self.experts.is_monolithic

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        """Scratch tensors for calls with at most ``num_tokens`` tokens."""
        seen = num_tokens if self.prepare_finalize is None else self.prepare_finalize.max_tokens(num_tokens)
        return self.experts.workspaces(seen)

    def __getstate__(self) -> dict[str, Any]:
        # a copy is another kernel: it must not be found under the number of this one
        return {name: value for name, value in self.__dict__.items() if name != "_handle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()

    def _register(self) -> None:
        self._handle = next(_HANDLES)
        _KERNELS[self._handle] = self

    def workspace_nbytes(self, num_tokens: int) -> int:
        """Bytes of a workspace buffer for at most ``num_tokens`` tokens."""
        return workspace_nbytes(self.workspaces(num_tokens))

    def apply(
        self,
        hidden_states: Tensor,
        *,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None = None,
        adapter_ids: Tensor | None = None,
        output: Tensor | None = None,
    ) -> Tensor:
        """The routed experts' weighted sum.

        - ``hidden_states`` [M, K] of the config's dtype; columns contiguous, any row stride
        - ``topk_weights`` [M, k] float32, ``topk_ids`` [M, k] int32 or int64 (global ids)
        - ``expert_map`` [E] int32; needed where this rank holds only some experts
        - ``adapter_ids`` [M] int32: each token's adapter in :attr:`lora`; negative, or too large: none
        - ``output`` [M, K]: written and returned; allocated if not given

        Raises TensorError for arguments of the wrong shape, dtype or device, ConfigError on monolithic experts.
        Ids out of range select no expert (checking values would synchronise with the device).
        """
        if not isinstance(self.experts, FusedMoEExpertsModular):
            raise ConfigError(
                f"{type(self.experts).__name__} routes by itself: call apply_monolithic(x, router_logits=...)"
            )
        if output is None:
            output = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        if torch.compiler.is_compiling():
            torch.ops.moe_core.fused_moe(
                output, hidden_states, topk_weights, topk_ids, expert_map, self._handle, adapter_ids
            )
            return output
        self._check(hidden_states, output)
        self._check_routing(hidden_states, topk_weights, topk_ids, expert_map)
        self._check_adapters(hidden_states, adapter_ids)
        self._run(output, hidden_states, topk_weights, topk_ids, expert_map, adapter_ids)
        return output

    def apply_monolithic(
        self,
        hidden_states: Tensor,
        *,
        router_logits: Tensor,
        correction_bias: Tensor | None = None,
        expert_map: Tensor | None = None,
        output: Tensor | None = None,
    ) -> Tensor:
        """As :meth:`apply`, for experts that route: ``router_logits`` [M, E], ``correction_bias`` [E] float32."""
        if not isinstance(self.experts, FusedMoEExpertsMonolithic):
            raise ConfigError(f"{type(self.experts).__name__} does not route: call apply(x, topk_weights=, topk_ids=)")
        if output is None:
            output = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        if torch.compiler.is_compiling():
            torch.ops.moe_core.fused_moe_monolithic(
                output, hidden_states, router_logits, correction_bias, expert_map, self._handle
            )
            return output
        self._check(hidden_states, output)
        self._check_logits(hidden_states, router_logits, correction_bias, expert_map)
        self._run_monolithic(output, hidden_states, router_logits, correction_bias, expert_map)
        return output

    def _check(self, hidden_states: Tensor, output: Tensor) -> None:
        config = self.config
        check_shape("hidden_states", hidden_states, ("M", config.hidden_size))
        check_dtype("hidden_states", hidden_states, (config.dtype,))
        check_shape("output", output, (hidden_states.shape[0], config.hidden_size))
        check_dtype("output", output, (config.dtype,))
        for name, tensor in (("hidden_states", hidden_states), ("output", output)):
            if tensor.device != self.weights.device:
                raise TensorError(f"{name} is on {tensor.device}, the layer's weights are on {self.weights.device}")
        if hidden_states.stride(1) != 1 and hidden_states.shape[1] > 1:
            raise TensorError(
                f"hidden_states has strides {hidden_states.stride()}, expected contiguous columns (any row stride)"
            )
        if not output.is_contiguous():
            raise TensorError(f"output has strides {output.stride()}, expected contiguous [M, {config.hidden_size}]")

    def _check_routing(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None
    ) -> None:
        shape = (hidden_states.shape[0], self.config.top_k)
        check_shape("topk_weights", topk_weights, shape)
        check_shape("topk_ids", topk_ids, shape)
        # both are [M, k], so only the dtypes tell a swap
        check_dtype("topk_weights", topk_weights, (torch.float32,))
        check_dtype("topk_ids", topk_ids, _ID_DTYPES)
        for name, tensor in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
            if tensor.device != hidden_states.device:
                raise TensorError(f"{name} is on {tensor.device}, hidden_states on {hidden_states.device}")
        self._check_map(hidden_states, expert_map)

    def _check_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        correction_bias: Tensor | None,
        expert_map: Tensor | None,
    ) -> None:
        check_shape("router_logits", router_logits, (hidden_states.shape[0], self.config.num_experts))
        if correction_bias is not None:
            check_shape("correction_bias", correction_bias, (self.config.num_experts,))
        for name, tensor in (("router_logits", router_logits), ("correction_bias", correction_bias)):
            if tensor is not None and tensor.device != hidden_states.device:
                raise TensorError(f"{name} is on {tensor.device}, hidden_states on {hidden_states.device}")
        self._check_map(hidden_states, expert_map)

    def _check_adapters(self, hidden_states: Tensor, adapter_ids: Tensor | None) -> None:
        if adapter_ids is None:
            return
        if self._lora is None:
            raise ConfigError("adapter_ids are given, and the layer has no adapters: set its kernel's lora")
        check_shape("adapter_ids", adapter_ids, (hidden_states.shape[0],))
        check_dtype("adapter_ids", adapter_ids, (torch.int32,))
        if adapter_ids.device != hidden_states.device:
            raise TensorError(f"adapter_ids is on {adapter_ids.device}, hidden_states on {hidden_states.device}")

    def _check_map(self, hidden_states: Tensor, expert_map: Tensor | None) -> None:
        if expert_map is not None:
            check_shape("expert_map", expert_map, (self.config.num_experts,))
            check_dtype("expert_map", expert_map, (torch.int32,))
            if expert_map.device != hidden_states.device:
                raise TensorError(f"expert_map is on {expert_map.device}, hidden_states on {hidden_states.device}")
        elif self.config.local_experts < self.config.num_experts:
            raise TensorError(
                f"expert_map [{self.config.num_experts}] is missing: this rank holds "
                f"{self.config.local_experts} of {self.config.num_experts} experts"
            )

    def _scratch(self, num_tokens: int) -> Mapping[str, Tensor]:
        specs = self.experts.workspaces(num_tokens)
        workspace = self.workspace if self.workspace is not None else Workspace(self.weights.device)
        return workspace.take(specs)

    def _run(
        self,
        output: Tensor,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        adapter_ids: Tensor | None,
    ) -> None:
        experts, movement = self.experts, self.prepare_finalize
        if not isinstance(experts, FusedMoEExpertsModular) or movement is None:
            raise ConfigError(f"{type(experts).__name__} is not modular")
        if hidden_states.shape[0] == 0 and not movement.collective:
            return
        topk_weights, topk_ids = topk_weights.contiguous(), topk_ids.contiguous()
        expert_map = None if expert_map is None else expert_map.contiguous()
        carried = {} if adapter_ids is None else {"adapter_ids": adapter_ids.contiguous()}
        quantize_as = None if experts.claims.expects_unquantized_inputs else experts.activation_key
        static_scale = self.weights.quant_config.a1_scale if quantize_as is not None else None
        prepared = movement.prepare(
            hidden_states,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            expert_map=expert_map,
            quantize_as=quantize_as,
            # before tokens have met their experts there can be one scale only: the largest holds every value
            static_scale=None if static_scale is None else static_scale.amax().reshape(1),
            **carried,
        )
        applied: dict[str, Any] = {}
        if self._lora is not None and prepared.adapter_ids is not None:
            applied["lora"] = LoRA(self._lora, prepared.adapter_ids)
        tokens = prepared.hidden_states.shape[-2]
        if experts.activation_format is FusedMoEActivationFormat.BATCHED:
            shape: tuple[int, ...] = (*prepared.hidden_states.shape[:2], self.config.hidden_size)
        else:
            shape = output_shape(experts, tokens)
        # experts that reduce write the caller's output directly where their tokens are the caller's
        direct = experts.claims.reduces and not movement.collective and shape == tuple(output.shape)
        expert_output = output if direct else torch.empty(shape, dtype=output.dtype, device=output.device)
        if expert_output.numel():
            experts.apply(
                expert_output,
                prepared.hidden_states,
                self.weights,
                topk_weights=prepared.topk_weights,
                topk_ids=prepared.topk_ids,
                expert_map=prepared.expert_map,
                hidden_states_scale=prepared.scale,
                expert_tokens=prepared.expert_tokens,
                workspace=self._scratch(tokens),
                **applied,
            )
        movement.finalize(
            output,
            expert_output,
            prepared,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            expert_map=expert_map,
            reduce=self.reduce,
        )

    def _run_monolithic(
        self,
        output: Tensor,
        hidden_states: Tensor,
        router_logits: Tensor,
        correction_bias: Tensor | None,
        expert_map: Tensor | None,
    ) -> None:
        if not isinstance(self.experts, FusedMoEExpertsMonolithic):
            raise ConfigError(f"{type(self.experts).__name__} is not monolithic")
        if hidden_states.shape[0] == 0:
            return
        self.experts.apply(
            output,
            hidden_states,
            self.weights,
            router_logits=router_logits.contiguous(),
            correction_bias=None if correction_bias is None else correction_bias.contiguous(),
            expert_map=None if expert_map is None else expert_map.contiguous(),
            workspace=self._scratch(hidden_states.shape[0]),
        )


# An operator takes tensors and numbers only, so a kernel is named by a number.  Weak values: a number must
# not keep a layer's weights alive.
_HANDLES = itertools.count(1)
_KERNELS: weakref.WeakValueDictionary[int, FusedMoEKernel] = weakref.WeakValueDictionary()


def _kernel(handle: int) -> FusedMoEKernel:
    kernel = _KERNELS.get(handle)
    if kernel is None:
        raise ConfigError(f"the fused MoE kernel {handle} no longer exists; a compiled graph outlived its layer")
    return kernel


@torch.library.custom_op("moe_core::fused_moe", mutates_args=("output",))
def _fused_moe_op(
    output: Tensor,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    handle: int,
    adapter_ids: Tensor | None = None,
) -> None:
    kernel = _kernel(handle)
    kernel._check(hidden_states, output)
    kernel._check_routing(hidden_states, topk_weights, topk_ids, expert_map)
    kernel._check_adapters(hidden_states, adapter_ids)
    kernel._run(output, hidden_states, topk_weights, topk_ids, expert_map, adapter_ids)


@torch.library.custom_op("moe_core::fused_moe_monolithic", mutates_args=("output",))
def _fused_moe_monolithic_op(
    output: Tensor,
    hidden_states: Tensor,
    router_logits: Tensor,
    correction_bias: Tensor | None,
    expert_map: Tensor | None,
    handle: int,
) -> None:
    kernel = _kernel(handle)
    kernel._check(hidden_states, output)
    kernel._check_logits(hidden_states, router_logits, correction_bias, expert_map)
    kernel._run_monolithic(output, hidden_states, router_logits, correction_bias, expert_map)
