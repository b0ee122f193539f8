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
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from moe_core._support.async_result import AsyncResult
from moe_core._support.autocast import autocast_off
from moe_core.interface.prepare_finalize import TokenRouting
from moe_core.kernels.launch.current_device import current

if TYPE_CHECKING:
    from moe_core.runtime.kernel import FusedMoEKernel


class KernelCall:
    """A call in flight; its tokens are being dispatched.

    Steps run in order, each once, on the stream that is current at that time; :meth:`result` performs the remaining
    ones. Calls of one kernel, or of kernels that share a workspace, may be in flight at the same time on one stream.
    All ranks must perform the same steps of the same calls in the same order. The call's tensors must not be modified
    until it has ended. Until then, do not replay a CUDA graph in which the same groups exchange tokens: it may use the
    memory of the call.

    Args:
        kernel: Kernel of the layer.
        output: Result of the call.
        own: Result of this rank before the sum over ranks with the same tokens; may be ``output``.
        hidden_states: ``[M, K]``.
        routing: Routing of the tokens.
    """

    def __init__(
        self, kernel: FusedMoEKernel, output: Tensor, own: Tensor, hidden_states: Tensor, routing: TokenRouting
    ) -> None:
        self._kernel, self._output, self._partial, self._routing = kernel, output, own, routing
        self._movement = kernel.modular_parts()[1]
        # What the kernel has at the start of the call is used to its end.
        replay = kernel.replay_of_steps(output)
        self._run_experts = partial(kernel.run_experts, kernel.workspace, kernel.weights, kernel.lora, replay)
        self._finalized: AsyncResult[None] | None = None
        self._ended = False
        with autocast_off(output.device.type):
            self._prepared = self._movement.prepare_async(hidden_states, routing, *kernel.quantization())

    def run_experts(self) -> None:
        """Wait for the tokens, run the experts, and begin to combine the results."""
        if self._finalized is None:
            output = self._partial
            with autocast_off(output.device.type), current(output.device):
                prepared = self._prepared.wait()
                expert_output = self._run_experts(output, prepared)
                self._finalized = self._movement.finalize_async(
                    output, expert_output, prepared, self._routing, self._kernel.reduce
                )

    def result(self) -> Tensor:
        """Wait for the results and return the output of the call."""
        if not self._ended:
            self.finish_tokens()
            with autocast_off(self._output.device.type):
                self._movement.sum_ranks(self._output, self._partial)
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
