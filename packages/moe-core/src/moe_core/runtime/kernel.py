"""The modular kernel: prepare, experts and finalize as one call.

``apply`` checks its arguments, runs the three parts on the current stream and returns. Under ``torch.compile`` the call
becomes one opaque operator that only writes its output, so a model compiles with ``fullgraph=True``. Eager calls bypass
the operator, because its dispatch would cost more than the launches of a small layer.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_core._support.autocast import autocast_off
from moe_core._support.fake import is_fake
from moe_core.errors import ConfigError, TensorError, check_instance
from moe_core.interface.call_arguments import (
    check_call,
    check_counts,
    check_hidden_states,
    check_logits,
    check_output,
    check_routing_values,
    refuse_gradients,
    refuse_values,
)
from moe_core.interface.experts import (
    FusedMoEExperts,
    FusedMoEExpertsModular,
    FusedMoEExpertsMonolithic,
)
from moe_core.interface.prepare_finalize import (
    FusedMoEPrepareAndFinalizeModular,
    Prepared,
    TokenRouting,
    TopKWeightAndReduce,
)
from moe_core.interface.recordable import RecordableExperts
from moe_core.kernels.launch.compile_ahead import Progress
from moe_core.kernels.launch.current_device import current
from moe_core.kernels.launch.replay import Replay
from moe_core.parallel.prepare_finalize.reductions import TopKWeightAndReduceContiguous, TopKWeightAndReduceNoOP
from moe_core.runtime.kernel_call import KernelCall
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.environment import checks_values
from moe_core.spec.lora import LoRA, LoRAWeights
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.weights import KernelWeights
from moe_core.spec.workspace import Workspace, WorkspaceLayout, WorkspaceSpec, workspace_nbytes


class FusedMoEKernel:
    """A runnable layer: experts, their weights, and the prepare/finalize that moves tokens.

    Call :meth:`apply` with ``topk_weights`` and ``topk_ids`` for modular experts, and :meth:`apply_monolithic` with
    ``router_logits`` for monolithic experts.

    Args:
        experts: Experts of the selected backend.
        weights: Converted weights in the backend's layout.
        prepare_finalize: Dispatches tokens to the experts and combines the results. Modular experts require it.
            Monolithic experts accept only one that sums what ranks computed.
        workspace: Workspace of the calls; layers that run one after another may share it.
        lora: Slots for adapters, if the config enables them; :attr:`lora` may also be set later.

    Raises:
        ConfigError: The parts do not fit together.
        TensorError: The workspace is on another device than the weights.
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
        if not isinstance(experts, FusedMoEExperts):
            raise ConfigError(f"experts is {experts!r}, expected an instance of FusedMoEExperts")
        check_instance("prepare_finalize", prepare_finalize, FusedMoEPrepareAndFinalizeModular, type(None))
        if isinstance(experts, FusedMoEExpertsModular):
            if prepare_finalize is None:
                raise ConfigError(f"{type(experts).__name__} is modular and needs prepare_finalize")
            if prepare_finalize.activation_format is not experts.activation_format:
                raise ConfigError(
                    f"{type(prepare_finalize).__name__} returns activations in the "
                    f"{prepare_finalize.activation_format.value} format, but {type(experts).__name__} takes "
                    f"{experts.activation_format.value}"
                )
            key = experts.activation_key
            if prepare_finalize.empty_rows and key is not None and key.spans_tokens:
                raise ConfigError(
                    f"{type(prepare_finalize).__name__} passes padding rows, which one scale over all rows would "
                    f"include: activation_key {key} is not supported"
                )
        elif prepare_finalize is not None and (not prepare_finalize.monolithic or prepare_finalize.maps_experts):
            raise ConfigError(
                f"{type(experts).__name__} is monolithic: prepare_finalize may only add partial sums of ranks, "
                f"got {type(prepare_finalize).__name__}"
            )
        if experts.config.is_lora_enabled and prepare_finalize is not None and not prepare_finalize.lora:
            raise ConfigError(f"{type(prepare_finalize).__name__} does not transfer adapter_ids (LoRA)")
        if experts.config.batch_invariant and prepare_finalize and not prepare_finalize.claims.batch_invariant:
            raise ConfigError(
                f"{type(prepare_finalize).__name__} does not claim batch invariance, which the layer requires"
            )
        self.experts = experts
        self.prepare_finalize = prepare_finalize
        # Quantize before dispatch if the experts accept it: fewer bytes cross ranks.
        across = prepare_finalize is not None and prepare_finalize.collective and prepare_finalize.claims.quantizes
        before = across and experts.takes_quantized
        #: Quantization of hidden states by prepare; None: not at all.
        self._quantize_as = experts.activation_key if before or not experts.claims.expects_unquantized_inputs else None
        self.weights = weights
        self._captured_workspaces: tuple[Workspace, ...] = ()
        self.workspace = workspace
        self.reduce: TopKWeightAndReduce = (
            TopKWeightAndReduceNoOP() if experts.claims.reduces else TopKWeightAndReduceContiguous()
        )
        self.lora = lora
        self._register()

    def __repr__(self) -> str:
        moves = "" if self.prepare_finalize is None else f", {type(self.prepare_finalize).__name__}"
        return f"{type(self).__name__}({type(self.experts).__name__}{moves})"

    @property
    def config(self) -> FusedMoEConfig:
        """The config of the layer on this rank."""
        return self.experts.config

    @property
    def weights(self) -> KernelWeights:
        """The weights in the layout of the experts' backend.

        Assigning other weights releases the old ones at once, along with everything that earlier calls derived from
        them. CUDA graphs that were captured keep reading the memory of the old weights; to overwrite these in place,
        use :meth:`KernelWeights.copy_`.
        """
        return self._weights

    @weights.setter
    def weights(self, weights: KernelWeights) -> None:
        if not isinstance(weights, KernelWeights):
            raise ConfigError(
                f"weights is {type(weights).__name__}, expected what oracle.convert returns: KernelWeights"
            )
        self._weights = weights
        self._replay = self._new_replay()

    @property
    def lora(self) -> LoRAWeights | None:
        """The LoRA adapters of the layer; an assigned value must fit its config and device."""
        return self._lora

    @lora.setter
    def lora(self, weights: LoRAWeights | None) -> None:
        check_instance("lora", weights, LoRAWeights, type(None))
        if weights is not None:
            weights.validate(self.config, self.weights.device)
        self._lora = weights

    @property
    def workspace(self) -> Workspace | None:
        """Workspace of the calls, on the weights' device; None if each call allocates with torch.

        A workspace that CUDA graphs were captured with is kept alive after it is replaced, because replays use its
        memory.
        """
        return self._workspace

    @workspace.setter
    def workspace(self, workspace: Workspace | None) -> None:
        check_instance("workspace", workspace, Workspace, type(None))
        if workspace is not None and workspace.place != self.weights.device:
            raise TensorError(
                f"the workspace is on {workspace.place}, the layer's weights are on {self.weights.device}"
            )
        before = self.__dict__.get("_workspace")
        if before is not None and before is not workspace and before.captured:
            self._captured_workspaces += (before,)
        self._workspace = workspace

    @property
    def is_monolithic(self) -> bool:
        """Whether the experts compute the routing themselves."""
        return self.experts.is_monolithic

    @property
    def shares_out(self) -> bool:
        """Whether ranks with the same tokens each get the output of only a part of them."""
        return self.prepare_finalize is not None and not self.prepare_finalize.sums_in_place

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        """Return the scratch tensors of calls with at most ``num_tokens`` tokens.

        Args:
            num_tokens: Largest number of tokens of a call on this rank.

        Returns:
            Specs of the tensors.
        """
        seen = num_tokens if self.prepare_finalize is None else self.prepare_finalize.max_tokens(num_tokens)
        return self.experts.workspaces(seen)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is a separate kernel and must not be found under this kernel's handle.
        kept = {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_ONE}
        return kept | {_VERSIONS: versions_of(self.experts)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = dict(state)
        made_by = kept.pop(_VERSIONS, None)
        here = versions_of(kept["experts"])
        if made_by != here:
            raise ConfigError(
                f"the layer was written by {_named(made_by)}, this is {_named(here)}: weight layouts can change "
                "between versions; load the layer from its checkpoint"
            )
        self.__dict__.update(kept)
        self._captured_workspaces = ()
        self._register()

    def _register(self) -> None:
        self._checks = checks_values()
        self._handle = next(_HANDLES)
        _KERNELS[self._handle] = self
        self._replay = self._new_replay()
        #: Workspace layouts, keyed by the number of tokens.
        self._layouts: dict[int, WorkspaceLayout] = {}

    def warm_up(self, max_tokens: int, *, progress: Progress | None = None) -> int:
        """Compile the kernels for calls with up to ``max_tokens`` tokens.

        This is :func:`moe_core.warm_up` of this layer alone.

        Args:
            max_tokens: Largest number of tokens of a call.
            progress: Callback that gets the number of ready kernels and their total.

        Returns:
            Number of compiled kernels.
        """
        from moe_core.runtime.compile_calls import compile_calls

        return compile_calls([(self, None)], max_tokens, progress=progress)

    def workspace_nbytes(self, num_tokens: int) -> int:
        """Return the size of a workspace for calls with at most ``num_tokens`` tokens.

        Args:
            num_tokens: Largest number of tokens of a call on this rank.

        Returns:
            Size in bytes.
        """
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
        tokens_per_rank: Sequence[int] | None = None,
    ) -> Tensor:
        """Compute the weighted sum of the routed experts.

        If tokens cross ranks, all ranks must call together, including ranks without tokens.

        For inference only: there are no gradients, and ``torch.autocast`` has no effect.

        Ids out of range (negative, or at least E) select no expert, and a NaN router weight makes the result of its
        token NaN: checking values would synchronize with the device. If ``MOE_CHECK=1`` was set in the environment when
        the layer was built, calls do check. They raise TensorError for an id outside -1 to E - 1, a NaN weight, and
        ``tokens_per_rank`` that does not match what the ranks bring.

        Args:
            hidden_states: ``[M, K]`` in the config's dtype; columns contiguous, any row stride.
            topk_weights: float32 ``[M, k]``; 16-bit weights are converted to float32.
            topk_ids: int32 or int64 ``[M, k]``, global ids.
            expert_map: int32 ``[E]``. Required if this rank holds only some experts and prepare does not know which.
            adapter_ids: Adapter of each token in :attr:`lora`, int32 ``[M]``; an id out of range selects no adapter. If
                omitted, no token uses one, whatever other ranks pass.
            output: ``[M, K]``, written and returned; allocated if omitted. It must not overlap other arguments. If
                ranks split the output rows it is ``[M', K]``
                (:meth:`~moe_core.FusedMoEPrepareAndFinalizeModular.output_tokens`).
            tokens_per_rank: Number of tokens that each of the ``dp_size`` ranks brings, if the caller knows it.
                Otherwise classes that need it exchange it, and the host waits. A caller that dispatches tokens itself
                passes the counts that this call's tokens were selected from; kernels are then chosen for that number of
                rows.

        Returns:
            ``output``.

        Raises:
            TensorError: Arguments of the wrong shape, dtype or device, or that require grad outside
                ``torch.no_grad()``.
            ConfigError: The experts are monolithic.
            CommunicationError: Another rank is missing.
        """
        compiling = torch.compiler.is_compiling()
        if compiling or is_fake(hidden_states):
            self.modular_parts()
            _refuse_export()
            self._refuse_gradients(hidden_states, topk_weights, output)
            if not compiling:
                self._checked_call(hidden_states, topk_weights, topk_ids, expert_map, adapter_ids, None)
            output = self._new_output(hidden_states) if output is None else output
            torch.ops.moe_core.fused_moe(
                output, hidden_states, topk_weights, topk_ids, expert_map, self._handle, adapter_ids, tokens_per_rank
            )
            return output
        output = self._checked_call(hidden_states, topk_weights, topk_ids, expert_map, adapter_ids, output)
        self._run(output, hidden_states, _routing(topk_weights, topk_ids, expert_map, adapter_ids, tokens_per_rank))
        return output

    def start(
        self,
        hidden_states: Tensor,
        *,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None = None,
        adapter_ids: Tensor | None = None,
        output: Tensor | None = None,
        tokens_per_rank: Sequence[int] | None = None,
    ) -> KernelCall:
        """Begin an :meth:`apply` in steps: dispatch tokens to the ranks of their experts.

        Work launched before the steps of the :class:`~moe_core.runtime.kernel_call.KernelCall` overlaps with the
        dispatch: shared experts, or ``start`` of the next micro-batch. Not supported under ``torch.compile``.

        Args:
            hidden_states: As in :meth:`apply`.
            topk_weights: As in :meth:`apply`.
            topk_ids: As in :meth:`apply`.
            expert_map: As in :meth:`apply`.
            adapter_ids: As in :meth:`apply`.
            output: As in :meth:`apply`.
            tokens_per_rank: As in :meth:`apply`.

        Returns:
            The call in flight.

        Raises:
            TensorError: As in :meth:`apply`, and for tensors of FakeTensorMode.
            ConfigError: The experts are monolithic.
        """
        _, movement = self.modular_parts()
        if is_fake(hidden_states):
            raise TensorError("hidden_states has no values (FakeTensorMode), which separate steps need; call apply")
        output = self._checked_call(hidden_states, topk_weights, topk_ids, expert_map, adapter_ids, output)
        partial = output if movement.sums_in_place else torch.empty_like(hidden_states)
        routing = _routing(topk_weights, topk_ids, expert_map, adapter_ids, tokens_per_rank)
        return KernelCall(self, output, partial, hidden_states, routing)

    def modular_parts(self) -> tuple[FusedMoEExpertsModular, FusedMoEPrepareAndFinalizeModular]:
        """Return the experts and the prepare/finalize of a kernel of modular experts.

        Raises:
            ConfigError: The experts are monolithic.
        """
        experts, movement = self.experts, self.prepare_finalize
        if experts.is_monolithic or movement is None:
            raise ConfigError(
                f"{type(experts).__name__} is monolithic (it routes itself): call apply_monolithic(x, "
                "router_logits=...)"
            )
        modular: Any = experts  # isinstance with an abstract class takes longer
        return modular, movement

    def quantization(self) -> tuple[QuantKey | None, Tensor | None]:
        """Return how prepare quantizes hidden states: the key, and the static scale ``[1]``; None: not at all."""
        key = self._quantize_as
        scale = None if key is None else self._weights.quant_config.a1_scale
        # Before dispatch only one scale is possible: the largest covers every value.
        return key, None if scale is None else scale.amax().reshape(1)

    def _checked_call(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        adapter_ids: Tensor | None,
        output: Tensor | None,
    ) -> Tensor:
        """Check the arguments of a call of modular experts; return the output tensor."""
        self._refuse_gradients(hidden_states, topk_weights, output)
        movement, config = self.prepare_finalize, self.experts.config
        check_call(
            hidden_states,
            topk_weights,
            topk_ids,
            expert_map,
            adapter_ids,
            config=config,
            device=self._weights.w13.device,
            mapped=movement is not None and movement.maps_experts,
            lora=self._lora,
        )
        output = self._output(hidden_states, output)
        if self._checks:
            check_routing_values(topk_weights, topk_ids, config)
        return output

    def _refuse_gradients(self, hidden_states: Tensor, topk_weights: Tensor, output: Tensor | None) -> None:
        if torch.is_grad_enabled():
            refuse_gradients(hidden_states=hidden_states, topk_weights=topk_weights, output=output)
            if self._lora is not None:
                refuse_gradients(**{f"lora.{name}": tensor for name, tensor in self._lora.tensors()})

    def apply_monolithic(
        self,
        hidden_states: Tensor,
        *,
        router_logits: Tensor,
        correction_bias: Tensor | None = None,
        expert_map: Tensor | None = None,
        output: Tensor | None = None,
    ) -> Tensor:
        """Compute the weighted sum of the routed experts; the experts compute the routing.

        Args:
            hidden_states: As in :meth:`apply`.
            router_logits: ``[M, E]`` in float32, bfloat16 or float16.
            correction_bias: ``[E]`` in float32, bfloat16 or float16.
            expert_map: As in :meth:`apply`.
            output: As in :meth:`apply`.

        Returns:
            ``output``.

        Raises:
            TensorError: As in :meth:`apply`.
            ConfigError: The experts are modular.
        """
        if not isinstance(self.experts, FusedMoEExpertsMonolithic):
            raise ConfigError(
                f"{type(self.experts).__name__} is not monolithic (it does not route): call apply(x, "
                "topk_weights=, topk_ids=)"
            )
        if torch.is_grad_enabled():
            refuse_gradients(
                hidden_states=hidden_states,
                router_logits=router_logits,
                correction_bias=correction_bias,
                output=output,
            )
        if torch.compiler.is_compiling() or is_fake(hidden_states):
            _refuse_export()
            if not torch.compiler.is_compiling():
                self._check_logits(hidden_states, router_logits, correction_bias, expert_map)
            output = self._new_output(hidden_states) if output is None else output
            torch.ops.moe_core.fused_moe_monolithic(
                output, hidden_states, router_logits, correction_bias, expert_map, self._handle
            )
            return output
        self._check_logits(hidden_states, router_logits, correction_bias, expert_map)
        output = self._output(hidden_states, output)
        self._run_monolithic(output, hidden_states, router_logits, correction_bias, expert_map)
        return output

    def _check_logits(
        self, hidden_states: Tensor, router_logits: Tensor, correction_bias: Tensor | None, expert_map: Tensor | None
    ) -> None:
        check_hidden_states(hidden_states, self.config, self._weights.device)
        check_logits(hidden_states, router_logits, correction_bias, expert_map, self.config)

    def _output(self, hidden_states: Tensor, output: Tensor | None) -> Tensor:
        """Check the caller's output, or allocate one."""
        if output is None:
            return self._new_output(hidden_states)
        check_output(output, hidden_states, self.config, self._output_rows(hidden_states))
        return output

    def _output_rows(self, hidden_states: Tensor) -> int:
        movement = self.prepare_finalize
        return hidden_states.shape[0] if movement is None else movement.output_tokens(hidden_states.shape[0])

    def _new_output(self, hidden_states: Tensor) -> Tensor:
        movement = self.prepare_finalize
        if movement is None or movement.sums_in_place:
            return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        return hidden_states.new_empty(self._output_rows(hidden_states), hidden_states.shape[1])

    def _layout(self, num_tokens: int) -> WorkspaceLayout:
        """Return the layout of the experts' scratch tensors.

        Recordable experts determine it by the layer and the number of tokens, so it is kept. A library may need more
        after a larger call.
        """
        if not isinstance(self.experts, RecordableExperts):
            return WorkspaceLayout(self.experts.workspaces(num_tokens))
        found = self._layouts.get(num_tokens)
        if found is None:
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            found = self._layouts[num_tokens] = WorkspaceLayout(self.experts.workspaces(num_tokens))
        return found

    def _run(self, output: Tensor, hidden_states: Tensor, routing: TokenRouting) -> None:
        """Run a call whose arguments have been checked."""
        experts, movement = self.modular_parts()
        if hidden_states.shape[0] == 0 and not movement.collective:
            # Take part in the sum, which detects the error that other ranks have tokens.
            movement.sum_ranks(output, output)
            return
        partial, counts = output if movement.sums_in_place else torch.empty_like(hidden_states), routing.tokens_per_rank
        # Recordings are not keyed by the total token count from which the caller selected these tokens.
        chosen = not movement.collective and counts is not None and sum(counts) != len(hidden_states)
        recorded, reserved = self._recordable and output.is_cuda and routing.adapter_ids is None and not chosen, None
        if recorded and movement.collective:
            if experts.claims.reduces:
                reserved = movement.reserve(partial, hidden_states, routing, self._quantize_as)
            recorded = reserved is not None
        if recorded:

            def call(workspace: Workspace) -> None:
                self.run_parts(workspace, partial, hidden_states, replace(routing, reserved=reserved))

            if reserved is None:
                given = partial, hidden_states, routing.topk_weights, routing.topk_ids, routing.expert_map
                self._replay.run(call, given, self._workspace)
            else:
                self._replay.run(call, reserved.tensors, self._workspace, *reserved.kind, step=reserved.step)
                reserved.end()
        else:
            self.run_parts(self._workspace, partial, hidden_states, routing)
        if movement.groups is not None:
            movement.sum_ranks(output, partial)

    def run_parts(
        self, workspace: Workspace | None, output: Tensor, hidden_states: Tensor, routing: TokenRouting
    ) -> None:
        """Run prepare, modular experts and finalize without the checks of :meth:`apply`.

        Works on any device, including meta. The results of ranks with the same tokens are not summed.

        Args:
            workspace: Workspace to use; None for a separate one of this call.
            output: ``[M, K]``, written.
            hidden_states: ``[M, K]``.
            routing: Routing of the tokens.
        """
        _, movement = self.modular_parts()
        with autocast_off(output.device.type), current(output.device):
            prepared = movement.prepare(hidden_states, routing, *self.quantization())
            reserved = routing.reserved
            replay = self.replay_of_steps(output) if movement.collective and reserved is None else None
            result = None if reserved is None else reserved.result
            expert_output = self.run_experts(workspace, self._weights, self._lora, replay, output, prepared, result)
            movement.finalize(output, expert_output, prepared, routing, self.reduce)

    def run_experts(
        self,
        workspace: Workspace | None,
        weights: KernelWeights,
        lora: LoRAWeights | None,
        replay: Replay | None,
        output: Tensor,
        prepared: Prepared,
        result: Tensor | None = None,
    ) -> Tensor:
        """Run the experts on prepared tokens.

        Args:
            workspace: Workspace to use; None for a separate one of this call.
            weights: Weights in the backend's layout.
            lora: LoRA adapters of the layer.
            replay: Recorded launches of the experts; None if prepare and finalize are part of the replay.
            output: ``[M, K]``, the output of the call. Experts may write their result to it.
            prepared: Result of prepare.
            result: Memory for the experts' output; by default it is allocated, or ``output``.

        Returns:
            The experts' output, for finalize.
        """
        experts, movement = self.modular_parts()
        x, routing, applied = prepared.hidden_states, prepared.routing, dict[str, Any]()
        if lora is not None and routing.adapter_ids is not None:
            applied["lora"] = LoRA(lora, routing.adapter_ids)
        tokens, config, reduces = x.shape[-2], experts.config, experts.claims.reduces
        # A row per token, per pair, or per row of the batched format.
        rows = (x.shape[0], config.top_k) if x.dim() == 2 and not reduces else x.shape[:-1]
        shape = (*rows, config.hidden_size)
        # Experts that reduce can write the output directly if their tokens are the caller's.
        direct = reduces and not movement.collective and shape == output.shape
        if result is None:
            result = output if direct else torch.empty(shape, dtype=output.dtype, device=output.device)
        expert_output = result

        def compute(workspace: Workspace) -> None:
            with workspace.lock:
                experts.apply(
                    expert_output,
                    x,
                    weights,
                    topk_weights=routing.topk_weights,
                    topk_ids=routing.topk_ids,
                    expert_map=routing.expert_map,
                    hidden_states_scale=prepared.scale,
                    expert_tokens=prepared.expert_tokens,
                    workspace=workspace.take(self._layout(tokens)),
                    **applied,
                )

        if not expert_output.numel():
            pass
        elif replay is not None and not applied and prepared.expert_tokens is None:
            given = expert_output, x, prepared.scale, routing.topk_weights, routing.topk_ids, routing.expert_map
            replay.run(compute, given, workspace)
        else:
            compute(Workspace(weights.device) if workspace is None else workspace)
        return expert_output

    def replay_of_steps(self, output: Tensor) -> Replay | None:
        """Return the recorded launches of the experts for a call in steps.

        Args:
            output: Output of the call.

        Returns:
            The recorded launches; None if the experts' launches are not replayed on their own.
        """
        _, movement = self.modular_parts()
        return self._replay if self._recordable and movement.collective and output.is_cuda else None

    def _new_replay(self) -> Replay:
        """Return records of calls with the current weights, of which there are none yet."""
        experts, movement = self.experts, self.prepare_finalize
        # For a call whose tokens cross ranks, only the experts' own launches are recorded here.
        records = movement is not None and (movement.collective or movement.recordable)
        shares = movement is not None and (movement.collective or movement.stateless)
        #: Whether launches of calls on a GPU are recorded.
        self._recordable = records and isinstance(experts, RecordableExperts)

        def alike() -> Hashable | None:
            key = experts.launch_key if shares and isinstance(experts, RecordableExperts) else None
            return None if key is None else (key, type(movement))

        return Replay(self._weights, alike)

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
        if self._checks:
            refuse_values("router_logits", router_logits, router_logits.isnan(), "numbers")
        movement = self.prepare_finalize
        partial = output if movement is None or movement.sums_in_place else torch.empty_like(hidden_states)
        if len(hidden_states):
            scratch = Workspace(self._weights.device) if self._workspace is None else self._workspace
            with autocast_off(output.device.type), current(output.device), scratch.lock:
                self.experts.apply(
                    partial,
                    hidden_states,
                    self._weights,
                    router_logits=router_logits.contiguous(),
                    correction_bias=None if correction_bias is None else correction_bias.contiguous(),
                    expert_map=None if expert_map is None else expert_map.contiguous(),
                    workspace=scratch.take(self._layout(hidden_states.shape[0])),
                )
        if movement is not None:
            movement.sum_ranks(output, partial)


def _routing(
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    adapter_ids: Tensor | None,
    tokens_per_rank: Sequence[int] | None,
) -> TokenRouting:
    """Return the routing as prepare and the experts take it.

    Conversions are made here, outside of the recorded call: recordings contain no torch operations.
    """
    if tokens_per_rank is not None:
        check_counts(tokens_per_rank)
    return TokenRouting(
        topk_weights.to(torch.float32).contiguous(),
        topk_ids.contiguous(),
        None if expert_map is None else expert_map.contiguous(),
        None if adapter_ids is None else adapter_ids.contiguous(),
        tokens_per_rank,
    )


#: Largest number of workspace layouts that a kernel keeps.
MOST_LAYOUTS = 128
#: Key in the state of a pickled kernel.
_VERSIONS = "versions"
#: Attributes that copies do not inherit.
_OF_THIS_ONE = frozenset({"_handle", "_replay", "_layouts", "_captured_workspaces"})


def versions_of(experts: FusedMoEExperts) -> dict[str, str | None]:
    """Return the versions of the packages that define the weight layout of some experts.

    Args:
        experts: Experts of a layer.

    Returns:
        Version by package; None if the package states none.
    """
    packages = ("moe_core", type(experts).__module__.partition(".")[0])
    return {name: getattr(sys.modules.get(name), "__version__", None) for name in packages}


def _named(versions: dict[str, str | None] | None) -> str:
    return "an unknown version" if versions is None else ", ".join(f"{name} {one}" for name, one in versions.items())


# Operators accept only tensors and numbers, so a handle identifies a kernel. Weak values, so that a handle does not
# keep a layer's weights alive.
_HANDLES = itertools.count(1)
_KERNELS: weakref.WeakValueDictionary[int, FusedMoEKernel] = weakref.WeakValueDictionary()


def _kernel(handle: int) -> FusedMoEKernel:
    kernel = _KERNELS.get(handle)
    if kernel is None:
        raise ConfigError(f"the fused MoE kernel {handle} no longer exists; a compiled graph outlived its layer")
    return kernel


def _refuse_export() -> None:
    """Raise ConfigError under ``torch.export``: in another process a handle may be any layer."""
    # The flag that `is_exporting` returns: in torch 2.11 torch.compile evaluates a call of that function to True.
    if getattr(torch.compiler, "_is_exporting_flag", False):
        raise ConfigError(
            "torch.export does not support the experts: the graph refers to their kernel by an id of this "
            "process, and they are not parameters; use torch.compile"
        )


@torch.library.custom_op("moe_core::fused_moe", mutates_args=("output",))
def _fused_moe_op(
    output: Tensor,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    handle: int,
    adapter_ids: Tensor | None = None,
    tokens_per_rank: Sequence[int] | None = None,
) -> None:
    kernel = _kernel(handle)
    kernel._checked_call(hidden_states, topk_weights, topk_ids, expert_map, adapter_ids, output)
    kernel._run(output, hidden_states, _routing(topk_weights, topk_ids, expert_map, adapter_ids, tokens_per_rank))


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
    kernel._check_logits(hidden_states, router_logits, correction_bias, expert_map)
    kernel._output(hidden_states, output)
    kernel._run_monolithic(output, hidden_states, router_logits, correction_bias, expert_map)
