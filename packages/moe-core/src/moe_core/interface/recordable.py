"""Optional interface of experts whose launches can be recorded, replayed and derived without a device."""

from __future__ import annotations

from collections.abc import Hashable

from moe_core.interface.experts import FusedMoEExpertsModular


class RecordableExperts(FusedMoEExpertsModular):
    """Modular experts that only launch kernels.

    On the device, ``apply`` only launches kernels through `moe_core.kernels.launch.launch.launch`. Their arguments
    follow from the layer and from the shapes, strides and addresses of its tensors (see
    `moe_core.kernels.launch.replay`). Then repeated calls are replayed, and warm-up compiles without making calls.
    """

    @property
    def launch_key(self) -> Hashable | None:
        """Everything that determines the launches of ``apply`` apart from tensors; None: unknown.

        The tensors are those of the call and the memory layout of the weights. Layers that have equal keys and the same
        weight layout share their recorded launches.
        """
        return None

    def launch_variant(self, num_tokens: int) -> Hashable:
        """Identify the kernel variant that is selected for a number of tokens, without a device.

        Between token counts with the same variant, launches differ only by thresholds in the number of tokens (see
        :mod:`moe_core.runtime.call_launches`). Warm-up queries it for every number.

        Args:
            num_tokens: Number of tokens of the call.

        Returns:
            A value that identifies the variant.
        """
        return None
