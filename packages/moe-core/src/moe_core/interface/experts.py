"""Interface of every backend: the expert computation of a fused MoE layer.

A backend is one subclass in one file. It defines the claims, the weight layout, the workspace and ``apply``. There
are two kinds:

- *Modular* experts get ``topk_weights`` and ``topk_ids``; routing happens elsewhere.
- *Monolithic* experts get router logits and do the routing themselves, by the configured method.

The contract of both:

- ``claims`` describes the support completely. Whatever claims cannot express goes into
  :meth:`FusedMoEExperts.extra_reasons`. Nothing else decides whether a backend is eligible.
- :meth:`FusedMoEExperts.convert` is pure: it maps canonical weights to kernel weights and does not modify its input.
- ``apply`` writes every element of ``output``, and allocates nothing that :meth:`FusedMoEExperts.workspaces` could
  have declared. It does not synchronize with the host, and does not depend on previous contents of output or
  workspace. Host-driven classes (``cuda_graph=False``) may allocate and synchronize.
- With ``config.apply_router_weight_on_input``, experts of the standard format multiply x by the router weight instead
  of their result. Multiplying the first product before its bias is equivalent except for rounding. In the batched
  format prepare has already done it.
- An id that is negative, at least E, or mapped outside 0..E_local-1 (-1 by convention) selects no expert. It
  contributes nothing and causes no access outside the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from moe_core.errors import TensorError
from moe_core.interface.backend_order import Placement
from moe_core.interface.claims import Claims
from moe_core.spec.config import FusedMoEActivationFormat, FusedMoEConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import Environment
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.weights import KernelWeights, MoEWeights
from moe_core.spec.workspace import WorkspaceSpec


@dataclass(frozen=True, eq=False)
class ExpertTokensMetadata:
    """Token counts of the local experts, as far as prepare knows them.

    Attributes:
        expert_num_tokens: [E_local] int32, number of valid rows per expert; always present in the batched format.
        mean: Mean number of tokens per local expert, expected or known on the host. Set if a call's tokens were
            selected because they have an expert here; the experts then have more tokens than M and top-k imply.
            Kernel selection uses it.
    """

    expert_num_tokens: Tensor | None = None
    mean: float | None = None

    @staticmethod
    def rows_in_use(given: ExpertTokensMetadata | None) -> Tensor:
        """Return ``expert_num_tokens`` of a call in the batched format.

        Args:
            given: Metadata of the call, or None.

        Returns:
            [E_local] int32.

        Raises:
            TensorError: The counts are missing.
        """
        if given is None or given.expert_num_tokens is None:
            raise TensorError("expert_tokens is missing: the batched format needs the rows in use per expert")
        return given.expert_num_tokens


class FusedMoEExperts(ABC):
    """Base class of modular and monolithic experts; see the module docstring.

    An instance belongs to one layer on one kind of device and holds configuration, but no weights. Its creation does
    not access a device, so weights can be converted for a GPU that is not present.

    Args:
        config: Configuration of the layer.
        weight_key: Quantization key of the weights; None: 16 bits.
        activation_key: Quantization key of the activations; None: 16 bits.
        device: Target device; default: the current one.
    """

    claims: ClassVar[Claims]
    is_monolithic: ClassVar[bool] = False
    #: Position of a third-party backend among the scheme's own.
    placement: ClassVar[Placement] = Placement()

    def __init__(
        self,
        config: FusedMoEConfig,
        *,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        device: DeviceInfo | None = None,
    ) -> None:
        self.config = config
        self.weight_key = weight_key
        self.activation_key = activation_key
        self.device_info = device if device is not None else DeviceInfo.current()

    @property
    def takes_quantized(self) -> bool:
        """Whether :meth:`apply` of this layer accepts hidden states that are already quantized.

        That requires the claim, an activation key with separate scales per token
        (:attr:`moe_core.QuantKey.is_token_wise`), and no processing of tokens before quantization (LoRA, a router
        weight on the input, factors of the input's columns).
        """
        key, config = self.activation_key, self.config
        return (
            self.claims.takes_quantized
            and key is not None
            and key.is_token_wise
            and not (config.is_lora_enabled or config.apply_router_weight_on_input)
            and not (self.weight_key is not None and self.weight_key.pre_scaled)
        )

    @classmethod
    def extra_reasons(
        cls,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        device: DeviceInfo,
    ) -> list[str]:
        """List reasons against a request that ``claims`` cannot express (relations of sizes …).

        Args:
            config: Configuration of the layer.
            weight_key: Quantization key of the weights.
            activation_key: Quantization key of the activations.
            device: The device.

        Returns:
            The reasons; empty if there are none.
        """
        return []

    @classmethod
    def unsupported_reasons(
        cls,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        device: DeviceInfo,
        environment: Environment,
    ) -> list[str]:
        """List every reason why this class cannot serve a request.

        Args:
            config: Configuration of the layer.
            weight_key: Quantization key of the weights.
            activation_key: Quantization key of the activations.
            device: The device.
            environment: Installed software.

        Returns:
            The reasons; empty if it can.
        """
        return [
            *cls.claims.reasons_against(config, weight_key, activation_key, device, environment),
            *cls.extra_reasons(config, weight_key, activation_key, device),
        ]

    @classmethod
    def is_supported_config(
        cls,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        *,
        device: DeviceInfo | None = None,
        environment: Environment | None = None,
    ) -> tuple[bool, str | None]:
        """Whether this class can serve a request.

        Args:
            config: Configuration of the layer.
            weight_key: Quantization key of the weights.
            activation_key: Quantization key of the activations.
            device: The device; default: the current one.
            environment: Installed software; default: that of this interpreter.

        Returns:
            ``(True, None)``, or ``(False, reasons)`` with all reasons joined by "; ".
        """
        reasons = cls.unsupported_reasons(
            config, weight_key, activation_key, device or DeviceInfo.current(), environment or Environment.current()
        )
        return (not reasons, "; ".join(reasons) or None)

    @abstractmethod
    def convert(self, weights: MoEWeights) -> KernelWeights:
        """Convert canonical weights to this backend's layout on ``device_info``.

        Tensors whose layout does not change are passed through, not copied.

        Args:
            weights: Canonical weights.

        Returns:
            The kernel weights.
        """

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        """Declare the scratch tensors that ``apply`` needs.

        Args:
            num_tokens: Maximum number of tokens of a call.

        Returns:
            The scratch tensors.
        """
        return ()


class FusedMoEExpertsModular(FusedMoEExperts):
    """Experts that get ``topk_weights`` and ``topk_ids`` [M, k], with routing already done."""

    @abstractmethod
    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        weights: KernelWeights,
        *,
        topk_weights: Tensor,
        topk_ids: Tensor,
        workspace: Mapping[str, Tensor],
        expert_map: Tensor | None = None,
        hidden_states_scale: Tensor | None = None,
        expert_tokens: ExpertTokensMetadata | None = None,
    ) -> None:
        """Run the experts.

        All tensors are contiguous, except that the rows of ``hidden_states`` may have any stride. Experts that claim
        ``lora`` take another keyword, ``lora: LoRA | None = None``, with the adapters and the adapter id of each row
        (:mod:`moe_core.spec.lora`).

        Args:
            output: [M, K] in the config's dtype if the claims set ``reduces``; else [M, k, K], unweighted. Batched
                format: [E_local, T_max, K], unweighted.
            hidden_states: [M, K] (batched: [E_local, T_max, K]). Quantized unless the claims set
                ``expects_unquantized_inputs``; either way if :attr:`takes_quantized`.
            weights: Weights in this backend's layout.
            topk_weights: [M, k] float32.
            topk_ids: [M, k] int32 or int64, global expert ids.
            workspace: Scratch tensors by name, as declared by :meth:`workspaces`.
            expert_map: [E] int32, local index of each global expert, -1 if it is on another rank.
            hidden_states_scale: Scale of quantized hidden states.
            expert_tokens: Token counts of local experts, if known; always given in the batched format.
        """

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        """Layout of the hidden states, from the config."""
        return self.config.activation_format


class FusedMoEExpertsMonolithic(FusedMoEExperts):
    """Experts that get router logits [M, E] and do the routing given by ``config.routing``."""

    is_monolithic = True

    @abstractmethod
    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        weights: KernelWeights,
        *,
        router_logits: Tensor,
        workspace: Mapping[str, Tensor],
        correction_bias: Tensor | None = None,
        expert_map: Tensor | None = None,
        hidden_states_scale: Tensor | None = None,
    ) -> None:
        """Route and run the experts.

        Args:
            output: [M, K] in the config's dtype.
            hidden_states: [M, K].
            weights: Weights in this backend's layout.
            router_logits: [M, E].
            workspace: Scratch tensors by name, as declared by :meth:`workspaces`.
            correction_bias: [E] float32, or None.
            expert_map: [E] int32, local index of each global expert, -1 if it is on another rank.
            hidden_states_scale: Scale of quantized hidden states.
        """
