"""Common base of all experts that use the fused layer of `moe_core.kernels.gemm.fused`.

A subclass adds claims, `convert`, its weights, its activation scheme and its launch heuristics. Importing this module
does not import Triton.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from torch import Tensor

from moe_core.errors import TensorError
from moe_core.interface.experts import ExpertTokensMetadata
from moe_core.interface.recordable import RecordableExperts
from moe_core.kernels.gemm.heuristics import Family, LayerProblem, gemv_plan, launch_plan
from moe_core.kernels.gemm.heuristics.problem import balance_of, element_of
from moe_core.kernels.gemm.heuristics.tuned import Tuned
from moe_core.kernels.gemm.plan import GemvPlan, TilePlan
from moe_core.kernels.ops import layout
from moe_core.spec.config import FusedMoEActivationFormat, FusedMoEConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.lora import LoRA
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.weights import KernelWeights, MoEWeights, TensorPlaces
from moe_core.spec.workspace import WorkspaceSpec

if TYPE_CHECKING:
    from moe_core.kernels.gemm.fused.layer import FusedLayer
    from moe_core.kernels.gemm.fused.scheme import ActivationScheme
    from moe_core.kernels.gemm.gemv.plan import GemvLayer
    from moe_core.kernels.gemm.tiles.launch import GemmWeight


#: largest number of columns per step of the mainloop
WHOLE_COLUMNS = 128
#: largest number of (adapter, local expert) pairs: a program that sorts by them counts them all in registers
MOST_LORA_GROUPS = 8192
#: largest number of launch plans that a layer keeps
MOST_PLANS = 128


@dataclass(frozen=True, eq=False)
class LaunchPlan:
    """How calls with one number of tokens are computed.

    Attributes:
        layer: The fused layer.
        tiles: Its launch configurations.
        gemv: The layer for small M and its launch configurations; None if it does not compute this number of tokens.
    """

    layer: FusedLayer
    tiles: TilePlan
    gemv: tuple[GemvLayer, GemvPlan] | None


@dataclass(frozen=True, eq=False)
class LayerPlans:
    """Launch plans of one layer.

    Attributes:
        places: Weight tensors of which the layers hold views.
        tuned: Measured launch configurations that the plans are based on.
        layer: The fused layer.
        gemv: The layer for small M, or None.
        by_tokens: Plans by number of tokens and whether they are for a GPU.
    """

    places: TensorPlaces
    tuned: Tuned | None
    layer: FusedLayer
    gemv: GemvLayer | None
    by_tokens: dict[tuple[int, bool], LaunchPlan] = field(default_factory=dict)


class GroupedExperts(RecordableExperts):
    """Experts of the fused layer, in the standard and the batched format.

    The weights have ``w1_scale`` and ``w2_scale``.

    Attributes:
        family: Family whose launch heuristics choose the plans.
        accepted_spills: Accepted register spills in bytes per thread, for any target: for sizes that are multiples of
            16, and for others.
        accepted_lora_spills: Accepted register spills with LoRA, if larger.
        tuned: Measured launch configurations, which take precedence over the heuristics.
    """

    #: family whose launch heuristics choose the plans
    family: ClassVar[Family]
    #: accepted spills in bytes per thread, for any target: for sizes that are multiples of 16, and for others
    accepted_spills: ClassVar[tuple[int, int]] = (0, 0)
    #: accepted spills with LoRA, if larger: the epilogue holds LoRA deltas next to the sums
    accepted_lora_spills: ClassVar[int] = 0
    #: measured launch configurations, which take precedence over the heuristics (:mod:`moe_core.kernels.tuning`)
    tuned: Tuned | None = None

    @classmethod
    def extra_reasons(
        cls,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        device: DeviceInfo,
    ) -> list[str]:
        groups = config.max_loras * config.local_experts
        if not config.is_lora_enabled or groups <= MOST_LORA_GROUPS:
            return []
        found = f"{groups}: max_loras {config.max_loras} x {config.local_experts}"
        return [f"applies LoRA to at most {MOST_LORA_GROUPS} pairs of an adapter and a local expert, got {found}"]

    @abstractmethod
    def activation_scheme(self, weights: KernelWeights | None) -> ActivationScheme:
        """Return how x and h become GEMM operands.

        Args:
            weights: Weights of the layer; None if only the workspaces are needed.

        Returns:
            The scheme.
        """

    @abstractmethod
    def gemm_weight(self, name: str, weights: KernelWeights) -> GemmWeight:
        """Return the kernel arguments of one weight.

        Args:
            name: "w13" or "w2".
            weights: Weights of the layer.

        Returns:
            The weight as the kernels take it.
        """

    @property
    def launch_key(self) -> Hashable | None:
        # subclasses with further per-layer state add it
        return type(self), self.config, self.weight_key, self.activation_key, self.device_info, self.tuned

    @cached_property
    def batched(self) -> bool:
        """Whether the activations are in the batched format."""
        return self.activation_format is FusedMoEActivationFormat.BATCHED

    @property
    def takes_quantized(self) -> bool:
        # kernels read whole blocks of columns; they pad partial blocks with zeros only when they quantize themselves
        return super().takes_quantized and not self.batched and self.config.hidden_size % WHOLE_COLUMNS == 0

    @property
    def supports_split_k(self) -> bool:
        """Whether mainloops may be split among programs.

        The batched format has no workspace for partial sums, and their number depends on the number of tokens, which
        batch invariance forbids.
        """
        return not (self.batched or self.config.batch_invariant)

    @cached_property
    def problem(self) -> LayerProblem:
        """The layer as the launch heuristics see it; subclasses add their properties."""
        config = self.config
        return LayerProblem(
            self.family,
            element_of(self.weight_key),
            config.num_experts,
            config.top_k,
            config.hidden_size,
            config.intermediate_size,
            gated=config.is_gated,
            dtype_bytes=config.dtype.itemsize,
            lora=config.is_lora_enabled,
            capability=self.device_info.capability,
            may_split=self.supports_split_k,
            batch_invariant=config.batch_invariant,
            balance=balance_of(self.device_info),
            sharded=config.local_experts < config.num_experts,
        )

    def plan(self, num_tokens: int, on_gpu: bool = True) -> TilePlan:
        """Return the launch configurations for a number of tokens.

        Args:
            num_tokens: Number of tokens, or rows T_max of each expert's buffer in the batched format.
            on_gpu: False omits features that Triton's interpreter does not support.

        Returns:
            The plan.
        """
        measured = None if self.tuned is None else self.tuned.plan(TilePlan, num_tokens)
        plan = launch_plan(self.problem, num_tokens) if measured is None else measured
        return plan if on_gpu else plan.interpreted()

    @property
    def takes_vectors(self) -> bool:
        """Whether :meth:`gemv_layer` may compute the pairs of few tokens without a sort."""
        return False

    def gemv_layer(self, weights: KernelWeights) -> GemvLayer | None:
        """Return the same layer for small M.

        Args:
            weights: Weights of the layer.

        Returns:
            The layer, or None if there is none.
        """
        return None

    def gemv_plan(self, num_tokens: int, on_gpu: bool = True) -> GemvPlan | None:
        """Return the launch configurations of :meth:`gemv_layer`.

        Args:
            num_tokens: Number of tokens.
            on_gpu: False omits features that Triton's interpreter does not support.

        Returns:
            The plan, or None if the number of tokens is not computed that way.
        """
        if not self.takes_vectors:
            return None
        measured = None if self.tuned is None else self.tuned.at(num_tokens)
        plan = gemv_plan(self.problem, num_tokens) if measured is None else measured.plan
        if not isinstance(plan, GemvPlan):
            return None
        return plan if on_gpu else plan.interpreted()

    def launch_variant(self, num_tokens: int) -> Hashable:
        return self.plan(num_tokens), self.gemv_plan(num_tokens)

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        from moe_core.kernels.gemm.fused.scheme import CallShape

        return self.activation_scheme(None).workspaces(CallShape(self.config, num_tokens), self.supports_split_k)

    def scales(self, name: str, weights: KernelWeights) -> tuple[Tensor, Tensor | None]:
        """Return the scales and the bias of one weight.

        Args:
            name: "w13" or "w2".
            weights: Weights of the layer.

        Returns:
            ``(scales, bias)`` from the quant config.

        Raises:
            TensorError: If the quant config has no scale.
        """
        quant = weights.quant_config
        scale, bias = (quant.w1_scale, quant.w1_bias) if name == "w13" else (quant.w2_scale, quant.w2_bias)
        if scale is None:
            raise TensorError(
                "w1_scale or w2_scale is missing: the quantization config of quantized weights needs both"
            )
        return scale, bias

    def block_major(self, weights: MoEWeights, name: str) -> Tensor:
        """Return 8-bit weights in the layout that the kernels read fastest.

        On sm_90 this is block-major, [E, K / 128, rows, 128]: each TMA request reads contiguous memory, which is
        2 to 5 % faster than rows K bytes apart. Weights stay as they are on other devices, if K is not a multiple of
        the block, and if another owner keeps the weights too (`MoEWeights.shared`).

        Args:
            weights: Canonical weights.
            name: "w13" or "w2".

        Returns:
            The converted or the original tensor.
        """
        tensor: Tensor = getattr(weights, name)
        # kernels that read through pointers use 32-bit offsets within an expert
        fits = tensor.shape[2] % WHOLE_COLUMNS == 0 and tensor.shape[1] * tensor.shape[2] < 2**31
        if self.device_info.capability != 90 or weights.shared or not fits:
            return tensor
        return layout.block_major(tensor, WHOLE_COLUMNS)

    def sizes(self, name: str) -> tuple[int, int]:
        """Return the sizes of one weight.

        Args:
            name: "w13" or "w2".

        Returns:
            ``(rows, columns)``, with the rows of one half of w13.
        """
        hidden, size = self.config.hidden_size, self.config.intermediate_size
        return (size, hidden) if name == "w13" else (hidden, size)

    def launch_plan(self, weights: KernelWeights, num_tokens: int, on_gpu: bool = True) -> LaunchPlan:
        """Return how a number of tokens is computed; found once per layer.

        What it holds is created again if the weights have moved, or if other measured configurations apply.

        Args:
            weights: Weights of the layer.
            num_tokens: Number of tokens, or rows T_max of each expert's buffer in the batched format.
            on_gpu: False omits features that Triton's interpreter does not support.

        Returns:
            The plan.
        """
        known = self.__dict__.setdefault("_known_plans", WeakKeyDictionary())
        plans: LayerPlans | None = known.get(weights)
        if plans is None or not plans.places.unmoved() or plans.tuned is not self.tuned:
            from moe_core.kernels.gemm.fused.layer import FusedLayer
            from moe_core.kernels.gemm.tiles.launch import Activation

            w13, w2 = (self.gemm_weight(name, weights) for name in ("w13", "w2"))
            layer = FusedLayer(w13, w2, self.activation_scheme(weights), Activation.of(self.config))
            places = TensorPlaces(tensor for _, tensor in weights.tensors())
            plans = known[weights] = LayerPlans(places, self.tuned, layer, self.gemv_layer(weights))
        found = plans.by_tokens.get((num_tokens, on_gpu))
        if found is None:
            vectors = None if self.batched or plans.gemv is None else self.gemv_plan(num_tokens, on_gpu)
            gemv = None if plans.gemv is None or vectors is None else (plans.gemv, vectors)
            found = LaunchPlan(plans.layer, self.plan(num_tokens, on_gpu), gemv)
            if len(plans.by_tokens) >= MOST_PLANS:
                plans.by_tokens.clear()
            plans.by_tokens[num_tokens, on_gpu] = found
        return found

    def _tokens_alike(self, hidden_states: Tensor, expert_tokens: ExpertTokensMetadata | None) -> int:
        """Return the number of tokens of an equivalent call without remote experts.

        It would give the local experts as many rows as this call does. Some tokens of the call have no local expert.
        The result is at least the number of tokens of the call: its workspace may be too small for a plan of fewer
        tokens (split-K, vectors).
        """
        tokens, mean = hidden_states.shape[-2], None if expert_tokens is None else expert_tokens.mean
        if mean is None or self.batched:
            return tokens
        return max(tokens, round(mean * self.config.num_experts / self.config.top_k))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_known_plans"}

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
        lora: LoRA | None = None,
    ) -> None:
        from moe_core.kernels.gemm.tiles.launch import Routing
        from moe_core.kernels.ops.batch import Batch

        x_scale, on_gpu = hidden_states_scale, hidden_states.device.type != "cpu"
        plan = self.launch_plan(weights, self._tokens_alike(hidden_states, expert_tokens), on_gpu)
        if self.batched:
            batch = Batch(ExpertTokensMetadata.rows_in_use(expert_tokens), hidden_states.shape[1])
            plan.layer(hidden_states, output, batch, plan.tiles, workspace, lora=lora, x_scale=x_scale)
            return
        config, gemv = self.config, plan.gemv
        routing = Routing(topk_ids, topk_weights, config.local_experts, expert_map, config.apply_router_weight_on_input)
        if gemv is not None and x_scale is None and gemv[0].reads(hidden_states):
            gemv[0](hidden_states, output, routing, gemv[1], workspace)
        else:
            plan.layer(hidden_states, output, routing, plan.tiles, workspace, lora=lora, x_scale=x_scale)
