"""One call of a modular kernel in steps, between which other work can run.

::

    call = kernel.start(x, topk_weights=weights, topk_ids=ids)  # dispatch to the ranks of the experts begins
    shared = shared_experts(x)                                  # overlaps with the dispatch
    call.run_experts()                                          # waits for tokens; combine begins
    other = next_kernel_call()                                  # overlaps with the combine
    output = call.result()                                      # waits for the results
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
    """A call in flight; its tokens are being dispatched.

    Steps run in order, each once, on the stream that is current at that time; :meth:`result` performs the remaining
    ones. Calls of one kernel, or of kernels that share a workspace, may be in flight at the same time on one stream.
    All ranks must perform the same steps of the same calls in the same order. The call's tensors must not be modified
    until it has ended. Until then, do not replay a CUDA graph in which the same groups exchange tokens: it may use the
    memory of the call.

    Args:
        experts: Experts of the kernel.
        movement: Prepare/finalize of the kernel.
        weights: Weights in the backend's layout.
        reduce: Weighting and reduction over top-k.
        workspace: Workspace of the layer, or None for a separate one of this call.
        output: Result of the call.
        partial: Result before the sum over ranks with the same tokens; may be ``output``.
        hidden_states: ``[M, K]``.
        routing: Routing of the tokens.
        lora: LoRA adapters of the layer.
        replay: Recorded launches of the experts, used if prepare and finalize are not part of the replay.
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
        # Quantize before dispatch if the experts accept it: fewer bytes cross ranks.
        before = movement.collective and movement.claims.quantizes and experts.takes_quantized
        quantize_as = experts.activation_key if before or not claims.expects_unquantized_inputs else None
        static_scale = weights.quant_config.a1_scale if quantize_as is not None else None
        with autocast_off(output.device.type):
            self._prepared: Pending[Prepared] = movement.prepare_async(
                hidden_states,
                routing,
                quantize_as,
                # Before dispatch only one scale is possible: the largest covers every value.
                None if static_scale is None else static_scale.amax().reshape(1),
            )

    def run_experts(self) -> None:
        """Wait for the tokens, run the experts, and begin to combine the results."""
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
            # Experts that reduce can write the output directly if their tokens are the caller's.
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
        """Wait for the results and return the output of the call."""
        if not self._ended:
            self.finish_tokens()
            with autocast_off(self._output.device.type):
                self._movement.sum_ranks_async(self._output, self._partial).wait()
            self._ended = True
        return self._output

    def finish_tokens(self) -> None:
        """Finish the call, except for the sum over ranks with the same tokens."""
        self.run_experts()
        if self._finalized is not None:
            with autocast_off(self._output.device.type):
                self._finalized.wait()


def overlapped(starts: Iterable[Callable[[], KernelCall]]) -> list[Tensor]:
    """Run several calls (micro-batches) so that each computes while its neighbors communicate.

    The first call starts. Then each next call starts before the experts of the previous one run. The results are waited
    for at the end.

    Args:
        starts: Functions that begin a call each: ``partial(kernel.start, x, topk_weights=…, topk_ids=…)``.

    Returns:
        Outputs of the calls, in order.
    """
    calls: list[KernelCall] = []
    for start in starts:
        calls.append(start())
        if len(calls) > 1:
            calls[-2].run_experts()
    return [call.result() for call in calls]
