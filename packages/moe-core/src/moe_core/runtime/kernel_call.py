"""One call of a modular kernel in its steps, between which other work may run.

::

    call = kernel.start(x, topk_weights=weights, topk_ids=ids)  # tokens leave for the ranks of their experts
    shared = shared_experts(x)                                  # runs while they travel
    call.run_experts()                                          # waits for tokens; results leave
    other = next_kernel_call()                                  # runs while these travel
    output = call.result()                                      # waits for results
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from moe_core._support.async_result import Pending
from moe_core._support.autocast import autocast_off
from moe_core.interface.experts import FusedMoEExpertsModular, output_shape
from moe_core.interface.prepare_finalize import (
    FusedMoEPrepareAndFinalizeModular,
    Prepared,
    TokenRouting,
    TopKWeightAndReduce,
)
from moe_core.kernels.launch.current_device import current
from moe_core.kernels.launch.replay import Replay
from moe_core.spec.config import FusedMoEActivationFormat
from moe_core.spec.lora import LoRA, LoRAWeights
from moe_core.spec.weights import KernelWeights
from moe_core.spec.workspace import Workspace


class KernelCall:
    """A call that has begun: its tokens are on their way.

    Steps run in order, each once, on the stream that is current then; what is left of them :meth:`result` does.  Calls
    of one kernel, or of kernels that share a workspace, may be under way at the same time on one stream.  All ranks
    make the same steps of the same calls in the same order.  The call's tensors stay as they are until it has ended.
    Until then no CUDA graph is replayed in which the same groups exchange tokens: it may have the call's memory.

    ``workspace``: the layer's, or None for one of this call's own; ``replay``: by which the experts' launches are made,
    where prepare and finalize are not among what is replayed.
    """

    def __init__(
        self,
        experts: FusedMoEExpertsModular,
        movement: FusedMoEPrepareAndFinalizeModular,
        weights: KernelWeights,
        reduce: TopKWeightAndReduce,
        workspace: Workspace | None,
        output: Tensor,
        partial: Tensor,
        hidden_states: Tensor,
        routing: TokenRouting,
        lora: LoRAWeights | None,
        replay: Replay | None,
    ) -> None:
        self._experts, self._movement, self._weights, self._reduce = experts, movement, weights, reduce
        self._workspace, self._lora, self._output, self._partial = workspace, lora, output, partial
        self._routing, self._replay = routing, replay
        self._finalized: Pending[None] | None = None
        self._ended = False
        claims = experts.claims
        # what crosses ranks is quantised first where the experts can do with that: fewer bytes
        before = movement.collective and movement.claims.quantizes and experts.takes_quantized
        quantize_as = experts.activation_key if before or not claims.expects_unquantized_inputs else None
        static_scale = weights.quant_config.a1_scale if quantize_as is not None else None
        with autocast_off(output.device.type):
            self._prepared: Pending[Prepared] = movement.prepare_async(
                hidden_states,
                routing,
                quantize_as,
                # before tokens have met their experts there can be one scale only: the largest holds every value
                None if static_scale is None else static_scale.amax().reshape(1),
            )

    def run_experts(self) -> None:
        """Wait for the tokens, compute, and begin to bring the results back."""
        if self._finalized is not None:
            return
        experts, movement, output = self._experts, self._movement, self._partial
        with autocast_off(output.device.type), current(output.device):
            prepared = self._prepared.wait()
            routing, applied = prepared.routing, dict[str, Any]()
            if self._lora is not None and routing.adapter_ids is not None:
                applied["lora"] = LoRA(self._lora, routing.adapter_ids)
            tokens = prepared.hidden_states.shape[-2]
            if experts.activation_format is FusedMoEActivationFormat.BATCHED:
                shape: tuple[int, ...] = (*prepared.hidden_states.shape[:2], experts.config.hidden_size)
            else:
                shape = output_shape(experts, tokens)
            # experts that reduce write the caller's output directly where their tokens are the caller's
            direct = experts.claims.reduces and not movement.collective and shape == tuple(output.shape)
            expert_output = output if direct else torch.empty(shape, dtype=output.dtype, device=output.device)

            def compute(workspace: Workspace) -> None:
                with workspace.lock:
                    experts.apply(
                        expert_output,
                        prepared.hidden_states,
                        self._weights,
                        topk_weights=routing.topk_weights,
                        topk_ids=routing.topk_ids,
                        expert_map=routing.expert_map,
                        hidden_states_scale=prepared.scale,
                        expert_tokens=prepared.expert_tokens,
                        workspace=workspace.take(experts.workspaces(tokens)),
                        **applied,
                    )

            if not expert_output.numel():
                pass
            elif self._replay is not None and not applied and prepared.expert_tokens is None:
                came = prepared.hidden_states, prepared.scale, routing.topk_weights, routing.topk_ids
                self._replay.run(compute, (expert_output, *came, routing.expert_map), self._workspace)
            else:
                compute(self._workspace if self._workspace is not None else Workspace(self._weights.device))
            self._finalized = movement.finalize_async(output, expert_output, prepared, self._routing, self._reduce)

    def result(self) -> Tensor:
        """Wait for the results; the output of the call."""
        if not self._ended:
            self.finish_tokens()
            with autocast_off(self._output.device.type):
                self._movement.sum_ranks_async(self._output, self._partial).wait()
            self._ended = True
        return self._output

    def finish_tokens(self) -> None:
        """All of the call but the sum over ranks that have the same tokens."""
        self.run_experts()
        if self._finalized is not None:
            with autocast_off(self._output.device.type):
                self._finalized.wait()


def overlapped(starts: Iterable[Callable[[], KernelCall]]) -> list[Tensor]:
    """The results of several calls (micro-batches), of which each computes while the tokens of its neighbours travel.

    Each of ``starts`` begins a call: ``partial(kernel.start, x, topk_weights=…, topk_ids=…)``.  The order of work is:
    the first starts; then, for each, the next one starts before its own experts run; at the end results are waited for.
    """
    calls: list[KernelCall] = []
    for start in starts:
        calls.append(start())
        if len(calls) > 1:
            calls[-2].run_experts()
    return [call.result() for call in calls]
