"""The modular kernel: prepare + experts + finalize as one call.

``apply`` checks its arguments, runs the three parts on the current stream and returns.  Under
``torch.compile`` the call becomes one opaque operator that only writes its output, so
that a model compiles with ``fullgraph=True``; eager calls bypass the operator, whose dispatch
would cost more than a small layer's launches.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_core._support.autocast import autocast_off
from moe_core._support.fake import is_fake
from moe_core.errors import ConfigError, TensorError, check_instance
from moe_core.interface.call_arguments import (
    check_adapters,
    check_counts,
    check_hidden_states,
    check_logits,
    check_output,
    check_routing,
    check_routing_values,
    refuse_gradients,
    refuse_values,
)
from moe_core.interface.experts import (
    FusedMoEExperts,
    FusedMoEExpertsModular,
    FusedMoEExpertsMonolithic,
)
from moe_core.interface.prepare_finalize import FusedMoEPrepareAndFinalizeModular, TokenRouting, TopKWeightAndReduce
from moe_core.kernels.launch.compile_ahead import Progress
from moe_core.kernels.launch.current_device import current
from moe_core.kernels.launch.replay import Replay
from moe_core.parallel.prepare_finalize.reductions import TopKWeightAndReduceContiguous, TopKWeightAndReduceNoOP
from moe_core.runtime.kernel_call import KernelCall
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.environment import checks_values
from moe_core.spec.lora import LoRAWeights
from moe_core.spec.weights import KernelWeights
from moe_core.spec.workspace import Workspace, WorkspaceSpec, workspace_nbytes


class FusedMoEKernel:
    """A layer that can run: experts, their weights, and the prepare/finalize by which tokens reach them.

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
        if not isinstance(experts, FusedMoEExperts):
            raise ConfigError(f"experts is {experts!r}, expected an instance of FusedMoEExperts")
        check_instance("prepare_finalize", prepare_finalize, FusedMoEPrepareAndFinalizeModular, type(None))
        self.weights = weights
        if isinstance(experts, FusedMoEExpertsModular):
            if prepare_finalize is None:
                raise ConfigError(f"{type(experts).__name__} is modular and needs prepare_finalize")
            if prepare_finalize.activation_format is not experts.activation_format:
                raise ConfigError(
                    f"{type(prepare_finalize).__name__} brings the {prepare_finalize.activation_format.value} format, "
                    f"{type(experts).__name__} takes {experts.activation_format.value}"
                )
            key = experts.activation_key
            if prepare_finalize.empty_rows and key is not None and key.group_shape.is_per_tensor and not key.is_static:
                raise ConfigError(
                    f"{type(prepare_finalize).__name__} brings rows that no token is in, and a scale that all rows "
                    f"share would span them: activations are {key}"
                )
        elif prepare_finalize is not None and (not prepare_finalize.monolithic or prepare_finalize.maps_experts):
            raise ConfigError(
                f"{type(experts).__name__} is monolithic and takes no prepare_finalize but one that only adds up what "
                f"ranks computed, got {type(prepare_finalize).__name__}"
            )
        if experts.config.is_lora_enabled and prepare_finalize is not None and not prepare_finalize.lora:
            raise ConfigError(f"{type(prepare_finalize).__name__} does not carry the numbers of LoRA adapters")
        if experts.config.batch_invariant and prepare_finalize and not prepare_finalize.claims.batch_invariant:
            raise ConfigError(f"{type(prepare_finalize).__name__} does not claim to be batch invariant, the layer is")
        self.experts = experts
        self.prepare_finalize = prepare_finalize
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
        return self.experts.config

    @property
    def weights(self) -> KernelWeights:
        """The weights in the layout of the experts' backend.

        Setting others lets go of the old ones, and of what earlier calls have made of them, at once.  CUDA graphs that
        were captured go on reading the old ones' memory: :meth:`KernelWeights.copy_` overwrites these in place.
        """
        return self._weights

    @weights.setter
    def weights(self, weights: KernelWeights) -> None:
        if not isinstance(weights, KernelWeights):
            raise ConfigError(
                f"weights is {type(weights).__name__}, expected what oracle.convert returns: KernelWeights"
            )
        self._weights = weights
        self._replay = Replay(weights)

    @property
    def lora(self) -> LoRAWeights | None:
        """The adapters of the layer; what is set must fit its config and device."""
        return self._lora

    @lora.setter
    def lora(self, weights: LoRAWeights | None) -> None:
        check_instance("lora", weights, LoRAWeights, type(None))
        if weights is not None:
            weights.validate(self.config, self.weights.device)
        self._lora = weights

    @property
    def workspace(self) -> Workspace | None:
        """Scratch memory of the calls, on the device of the weights; None: taken from torch's allocator by each.

        One that CUDA graphs were captured with is kept when it is replaced: replays go on using its memory.
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
        return self.experts.is_monolithic

    @property
    def shares_out(self) -> bool:
        """Whether ranks that have the same tokens each get the output of a part of them."""
        return self.prepare_finalize is not None and not self.prepare_finalize.sums_in_place

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        """Scratch tensors for calls with at most ``num_tokens`` tokens."""
        seen = num_tokens if self.prepare_finalize is None else self.prepare_finalize.max_tokens(num_tokens)
        return self.experts.workspaces(seen)

    def __getstate__(self) -> dict[str, Any]:
        # a copy is another kernel: it must not be found under the number of this one
        kept = {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_ONE}
        return kept | {_VERSIONS: versions_of(self.experts)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = dict(state)
        made_by = kept.pop(_VERSIONS, None)
        here = versions_of(kept["experts"])
        if made_by != here:
            raise ConfigError(
                f"the layer was written by {_named(made_by)}, this is {_named(here)}: layouts of weights belong to one "
                "version; load the layer from its checkpoint"
            )
        self.__dict__.update(kept)
        self._captured_workspaces = ()
        self._register()

    def _register(self) -> None:
        self._checks = checks_values()
        self._handle = next(_HANDLES)
        _KERNELS[self._handle] = self
        self._replay = Replay(self._weights)

    def warm_up(self, max_tokens: int, *, progress: Progress | None = None) -> int:
        """Compile what calls with up to ``max_tokens`` tokens need: :func:`moe_core.warm_up` of this layer alone."""
        from moe_core.runtime.compile_calls import compile_calls

        return compile_calls([(self, None)], max_tokens, progress=progress)

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
        tokens_per_rank: Sequence[int] | None = None,
    ) -> Tensor:
        """The routed experts' weighted sum.

        - ``hidden_states`` [M, K] of the config's dtype; columns contiguous, any row stride
        - ``topk_weights`` [M, k] float32 (16 bits become float32), ``topk_ids`` [M, k] int32 or int64 (global ids)
        - ``expert_map`` [E] int32; needed where this rank holds only some experts, and prepare does not know which
        - ``adapter_ids`` [M] int32: each token's adapter in :attr:`lora`; negative, or too large: none; not given: none
          has any, whatever other ranks give
        - ``output`` [M, K]: written and returned; allocated if not given; in memory of its own ([M', K] where ranks
          share the rows out: :meth:`~moe_core.FusedMoEPrepareAndFinalizeModular.output_tokens`)
        - ``tokens_per_rank``: how many tokens each of the ``dp_size`` ranks brings, where the caller knows; otherwise
          classes that need it ask, and the host waits.  A caller that brings tokens to the ranks of their experts by
          itself says with it from how many the call's were chosen: kernels for as many rows are taken

        Where tokens cross ranks, all ranks call together, also those without tokens.

        For inference only: there are no gradients, and ``torch.autocast`` has no effect.

        Raises TensorError for arguments of the wrong shape, dtype or device, and for those that require grad outside
        ``torch.no_grad()``; ConfigError on monolithic experts; CommunicationError where another rank is not there.
        Ids out of range (negative, or E and more) select no expert, and a router weight that is NaN makes its token's
        result NaN: checking values would synchronise with the device.  With ``MOE_CHECK=1`` in the environment when
        the layer is made, calls do so: TensorError for an id other than -1 to E - 1, a weight that is NaN, and
        ``tokens_per_rank`` that are not what ranks bring.
        """
        parts = self._modular_parts()
        if torch.compiler.is_compiling() or is_fake(hidden_states):
            _refuse_export()
            self._refuse_gradients(hidden_states, topk_weights, output)
            if not torch.compiler.is_compiling():
                self._checked_call(hidden_states, topk_weights, topk_ids, expert_map, adapter_ids, None)
            output = self._new_output(hidden_states) if output is None else output
            torch.ops.moe_core.fused_moe(
                output, hidden_states, topk_weights, topk_ids, expert_map, self._handle, adapter_ids, tokens_per_rank
            )
            return output
        output = self._checked_call(hidden_states, topk_weights, topk_ids, expert_map, adapter_ids, output)
        self._run(*parts, output, hidden_states, topk_weights, topk_ids, expert_map, adapter_ids, tokens_per_rank)
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
        """Begin :meth:`apply`, whose arguments these are: tokens leave for the ranks of their experts.

        What is called before the steps of the :class:`~moe_core.runtime.kernel_call.KernelCall` runs while tokens
        travel: shared experts, the next micro-batch's ``start``.  Not under ``torch.compile``.
        """
        _, movement = self._modular_parts()
        if is_fake(hidden_states):
            raise TensorError("hidden_states has no values (FakeTensorMode): calls in steps need some, call apply")
        if tokens_per_rank is not None:
            check_counts(tokens_per_rank)
        output = self._checked_call(hidden_states, topk_weights, topk_ids, expert_map, adapter_ids, output)
        partial = output if movement.sums_in_place else torch.empty_like(hidden_states)
        routing = TokenRouting(
            topk_weights.to(torch.float32).contiguous(),
            topk_ids.contiguous(),
            None if expert_map is None else expert_map.contiguous(),
            None if adapter_ids is None else adapter_ids.contiguous(),
            tokens_per_rank,
        )
        replay = self._replay_of_steps(output)
        return self._begin(self._workspace, output, partial, hidden_states, routing, replay)

    def _begin(
        self,
        workspace: Workspace | None,
        output: Tensor,
        partial: Tensor,
        hidden_states: Tensor,
        routing: TokenRouting,
        replay: Replay | None = None,
    ) -> KernelCall:
        """A call whose arguments were checked; see :class:`KernelCall`."""
        experts, movement = self._modular_parts()
        return KernelCall(
            experts,
            movement,
            self._weights,
            self.reduce,
            workspace,
            output,
            partial,
            hidden_states,
            routing,
            self._lora,
            replay,
        )

    def _replay_of(self, experts: FusedMoEExperts, movement: FusedMoEPrepareAndFinalizeModular) -> Replay:
        """The records of calls as they are now."""
        if not self._replay.fits(self._weights, experts, movement):
            # of a call whose tokens cross ranks only the experts' own launches are recorded here
            shares = movement.collective or movement.stateless
            self._replay = Replay(
                self._weights,
                (self._weights, experts, movement),
                alike=lambda: (
                    (experts.launch_key, type(movement)) if shares and experts.launch_key is not None else None
                ),
            )
        return self._replay

    def _replay_of_steps(self, output: Tensor) -> Replay | None:
        """By which the experts' launches are made in a call that runs in steps, where they can be replayed."""
        experts, movement = self._modular_parts()
        if output.is_cuda and movement.collective and experts.launches_only:
            return self._replay_of(experts, movement)
        return None

    def _checked_call(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        adapter_ids: Tensor | None,
        output: Tensor | None,
    ) -> Tensor:
        """Where the result of a call of modular experts goes, whose arguments fit the layer."""
        self._refuse_gradients(hidden_states, topk_weights, output)
        output = self._checked(hidden_states, output)
        mapped = self.prepare_finalize is not None and self.prepare_finalize.maps_experts
        check_routing(hidden_states, topk_weights, topk_ids, expert_map, self.experts.config, mapped=mapped)
        check_adapters(hidden_states, adapter_ids, self._lora)
        if self._checks:
            check_routing_values(topk_weights, topk_ids, self.experts.config)
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
        """As :meth:`apply`, for experts that route: ``router_logits`` [M, E], ``correction_bias`` [E].

        Both are float32, bfloat16 or float16.
        """
        if not isinstance(self.experts, FusedMoEExpertsMonolithic):
            raise ConfigError(f"{type(self.experts).__name__} does not route: call apply(x, topk_weights=, topk_ids=)")
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
                self._checked(hidden_states, None)
                check_logits(hidden_states, router_logits, correction_bias, expert_map, self.config)
            output = self._new_output(hidden_states) if output is None else output
            torch.ops.moe_core.fused_moe_monolithic(
                output, hidden_states, router_logits, correction_bias, expert_map, self._handle
            )
            return output
        output = self._checked(hidden_states, output)
        check_logits(hidden_states, router_logits, correction_bias, expert_map, self.config)
        self._run_monolithic(output, hidden_states, router_logits, correction_bias, expert_map)
        return output

    def _checked(self, hidden_states: Tensor, output: Tensor | None) -> Tensor:
        """Where the result goes, beside hidden states that fit the layer."""
        check_hidden_states(hidden_states, self.experts.config, self._weights.device)
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

    def _scratch(self) -> Workspace:
        """The layer's workspace, or one of this call's own."""
        return self.workspace if self.workspace is not None else Workspace(self._weights.device)

    def _modular_parts(self) -> tuple[FusedMoEExpertsModular, FusedMoEPrepareAndFinalizeModular]:
        experts, movement = self.experts, self.prepare_finalize
        if not isinstance(experts, FusedMoEExpertsModular) or movement is None:
            raise ConfigError(f"{type(experts).__name__} routes by itself: call apply_monolithic(x, router_logits=...)")
        return experts, movement

    def _run(
        self,
        experts: FusedMoEExpertsModular,
        movement: FusedMoEPrepareAndFinalizeModular,
        output: Tensor,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        adapter_ids: Tensor | None,
        tokens_per_rank: Sequence[int] | None = None,
    ) -> None:
        if tokens_per_rank is not None:
            check_counts(tokens_per_rank)
        if hidden_states.shape[0] == 0 and not movement.collective:
            movement.sum_ranks_async(output, output).wait()  # other ranks may have tokens, which is an error
            return
        # here and not among the launches: a recorded call has no work of torch's in it
        topk_weights, topk_ids = topk_weights.to(torch.float32).contiguous(), topk_ids.contiguous()
        expert_map = None if expert_map is None else expert_map.contiguous()
        adapter_ids = None if adapter_ids is None else adapter_ids.contiguous()
        partial = output if movement.sums_in_place else torch.empty_like(hidden_states)

        def call(workspace: Workspace | None, replay: Replay | None = None) -> None:
            routing = TokenRouting(topk_weights, topk_ids, expert_map, adapter_ids, tokens_per_rank)
            self._begin(workspace, partial, partial, hidden_states, routing, replay).finish_tokens()

        # records do not know of how many tokens the caller has chosen these
        chosen = tokens_per_rank is not None and sum(tokens_per_rank) != len(hidden_states)
        recorded = adapter_ids is None and not chosen
        if recorded and output.is_cuda and experts.launches_only and movement.launches_only:
            given = partial, hidden_states, topk_weights, topk_ids, expert_map
            self._replay_of(experts, movement).run(call, given, self._workspace)
        else:
            call(self._workspace, self._replay_of_steps(output))
        movement.sum_ranks_async(output, partial).wait()

    def run_parts(self, workspace: Workspace, output: Tensor, hidden_states: Tensor, routing: TokenRouting) -> None:
        """Prepare, modular experts, finalize: :meth:`apply` behind its checks, on any device, meta too.

        ``output`` [M, K].  What ranks with the same tokens computed is not added up.
        """
        self._begin(workspace, output, output, hidden_states, routing).finish_tokens()

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
            scratch = self._scratch()
            with autocast_off(output.device.type), current(output.device), scratch.lock:
                self.experts.apply(
                    partial,
                    hidden_states,
                    self._weights,
                    router_logits=router_logits.contiguous(),
                    correction_bias=None if correction_bias is None else correction_bias.contiguous(),
                    expert_map=None if expert_map is None else expert_map.contiguous(),
                    workspace=scratch.take(self.experts.workspaces(hidden_states.shape[0])),
                )
        if movement is not None:
            movement.sum_ranks_async(output, partial).wait()


#: in the state of a pickled kernel
_VERSIONS = "versions"
#: what no copy has
_OF_THIS_ONE = frozenset({"_handle", "_replay", "_captured_workspaces"})


def versions_of(experts: FusedMoEExperts) -> dict[str, str | None]:
    """Versions of the packages that say how the weights of ``experts`` lie."""
    packages = ("moe_core", type(experts).__module__.partition(".")[0])
    return {name: getattr(sys.modules.get(name), "__version__", None) for name in packages}


def _named(versions: dict[str, str | None] | None) -> str:
    return "an unknown version" if versions is None else ", ".join(f"{name} {one}" for name, one in versions.items())


# An operator takes tensors and numbers only, so a kernel is named by a number.  Weak values: a number must
# not keep a layer's weights alive.
_HANDLES = itertools.count(1)
_KERNELS: weakref.WeakValueDictionary[int, FusedMoEKernel] = weakref.WeakValueDictionary()


def _kernel(handle: int) -> FusedMoEKernel:
    kernel = _KERNELS.get(handle)
    if kernel is None:
        raise ConfigError(f"the fused MoE kernel {handle} no longer exists; a compiled graph outlived its layer")
    return kernel


def _refuse_export() -> None:
    """ConfigError under ``torch.export``: in another process the number may be that of any layer."""
    # what `is_exporting` returns: in torch 2.11 torch.compile takes a call of that for True
    if getattr(torch.compiler, "_is_exporting_flag", False):
        raise ConfigError(
            "torch.export can't hold the experts: the graph names their kernel by a number of this process, and they "
            "are no parameters; use torch.compile"
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
    parts = kernel._modular_parts()
    kernel._run(*parts, output, hidden_states, topk_weights, topk_ids, expert_map, adapter_ids, tokens_per_rank)


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
    kernel._checked(hidden_states, output)
    check_logits(hidden_states, router_logits, correction_bias, expert_map, kernel.config)
    kernel._run_monolithic(output, hidden_states, router_logits, correction_bias, expert_map)
