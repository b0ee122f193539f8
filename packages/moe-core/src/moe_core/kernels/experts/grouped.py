"""What the experts of all schemes share that run through the fused layer of `moe_core.kernels.gemm.fused`.

A subclass adds claims, `convert`, its weights, its activation scheme and its launch heuristics.  Importing this imports
no Triton.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from torch import Tensor

from moe_core.errors import TensorError
from moe_core.interface.experts import ExpertTokensMetadata, FusedMoEExpertsModular
from moe_core.kernels.gemm.heuristics import Family, LayerProblem, gemv_plan, launch_plan
from moe_core.kernels.gemm.heuristics.gemv import GemvPlan
from moe_core.kernels.gemm.heuristics.problem import balance_of, element_of
from moe_core.kernels.gemm.heuristics.tuned import Tuned
from moe_core.kernels.gemm.plan import TilePlan
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


#: columns of a step of the k loop at most
WHOLE_COLUMNS = 128
#: most pairs of an adapter and a local expert: a program that sorts by them counts all in registers
MOST_LORA_GROUPS = 8192


class GroupedExperts(FusedMoEExpertsModular):
    """Standard and batched format; weights with ``w1_scale`` and ``w2_scale``."""

    launches_only = True
    #: whose launch heuristics choose its plans
    family: ClassVar[Family]
    #: bytes per thread that its kernels may spill for any target: of sizes that are multiples of 16, and of others
    accepted_spills: ClassVar[tuple[int, int]] = (0, 0)
    #: those with LoRA, where they are more: deltas stand beside the sums in the epilogue
    accepted_lora_spills: ClassVar[int] = 0
    #: measured launch configurations, which go before the heuristics' (:mod:`moe_core.kernels.tuning`)
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
        """How x and h become operands; without ``weights`` only its scratch memory is asked for."""

    @abstractmethod
    def gemm_weight(self, name: str, weights: KernelWeights) -> GemmWeight:
        """What the kernels get of ``name``, "w13" or "w2"."""

    @property
    def launch_key(self) -> Hashable | None:
        # subclasses that keep more of a layer than this add it
        return type(self), self.config, self.weight_key, self.activation_key, self.device_info, self.tuned

    @property
    def batched(self) -> bool:
        return self.activation_format is FusedMoEActivationFormat.BATCHED

    @property
    def takes_quantized(self) -> bool:
        # kernels read whole blocks of columns, whose rest they would have filled with zeros
        return super().takes_quantized and not self.batched and self.config.hidden_size % WHOLE_COLUMNS == 0

    @property
    def supports_split_k(self) -> bool:
        """Whether k loops may be split among programs: their parts have no place in the batched format, and how many
        there are depends on the number of tokens.
        """
        return not (self.batched or self.config.batch_invariant)

    @cached_property
    def problem(self) -> LayerProblem:
        """What the launch heuristics know of the layer; subclasses add what is theirs."""
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
        """Launch configurations for so many tokens, or rows T_max of each expert's buffer.

        For Triton's interpreter without what it does not know.
        """
        measured = None if self.tuned is None else self.tuned.plan(TilePlan, num_tokens)
        plan = launch_plan(self.problem, num_tokens) if measured is None else measured
        return plan if on_gpu else plan.interpreted()

    @property
    def takes_vectors(self) -> bool:
        """Whether the pairs of few tokens may be multiplied without being sorted, by :meth:`gemv_layer`."""
        return False

    def gemv_layer(self, weights: KernelWeights) -> GemvLayer | None:
        """The same layer for few tokens, where it has one."""
        return None

    def gemv_plan(self, num_tokens: int, on_gpu: bool = True) -> GemvPlan | None:
        """Its launch configurations, where so many tokens are computed so."""
        if not self.takes_vectors:
            return None
        measured = None if self.tuned is None else self.tuned.at(num_tokens)
        plan = gemv_plan(self.problem, num_tokens) if measured is None else measured.plan
        if not isinstance(plan, GemvPlan):
            return None
        return plan if on_gpu else plan.interpreted()

    def launch_choice(self, num_tokens: int) -> Hashable:
        return self.plan(num_tokens), self.gemv_plan(num_tokens)

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        from moe_core.kernels.gemm.fused.scheme import CallShape

        return self.activation_scheme(None).workspaces(CallShape(self.config, num_tokens), self.supports_split_k)

    def scales(self, name: str, weights: KernelWeights) -> tuple[Tensor, Tensor | None]:
        """(scales, bias) of "w13" or "w2" in the quant config."""
        quant = weights.quant_config
        scale, bias = (quant.w1_scale, quant.w1_bias) if name == "w13" else (quant.w2_scale, quant.w2_bias)
        if scale is None:
            raise TensorError("the quant config of quantised weights holds w1_scale and w2_scale")
        return scale, bias

    def input_scales(self, weights: MoEWeights) -> tuple[Tensor | None, Tensor | None]:
        """Of x and h [E]; float32, contiguous, where the activation key is static.  Raises TensorError without them."""
        scales = weights.w13_input_scale, weights.w2_input_scale
        if self.activation_key is None or not self.activation_key.is_static:
            return scales
        if scales[0] is None or scales[1] is None:
            name = "w13_input_scale" if scales[0] is None else "w2_input_scale"
            raise TensorError(f"{name} is missing, the activation key is {self.activation_key}")
        return scales[0].float().contiguous(), scales[1].float().contiguous()

    def block_major(self, weights: MoEWeights, name: str) -> Tensor:
        """Weights "w13" or "w2" of 8-bit elements, in the order in which kernels read them fastest.

        On sm_90 block-major, [E, K / 128, rows, 128]: what one request of the tensor memory accelerator asks for lies
        together, which memory delivers 2 to 5 % faster than rows K bytes apart.  Elsewhere, where a row ends in a part
        of a block, and where somebody else keeps the weights too (`MoEWeights.shared`), as they are.
        """
        tensor: Tensor = getattr(weights, name)
        # kernels that read by pointers count the bytes of an expert in 32 bits
        fits = tensor.shape[2] % WHOLE_COLUMNS == 0 and tensor.shape[1] * tensor.shape[2] < 2**31
        if self.device_info.capability != 90 or weights.shared or not fits:
            return tensor
        return layout.block_major(tensor, WHOLE_COLUMNS)

    def sizes(self, name: str) -> tuple[int, int]:
        """(rows of one half, columns) of "w13" or "w2"."""
        hidden, size = self.config.hidden_size, self.config.intermediate_size
        return (size, hidden) if name == "w13" else (hidden, size)

    def layers(self, weights: KernelWeights) -> tuple[FusedLayer, GemvLayer | None]:
        """What the calls with ``weights`` share: the layer, and that for few tokens.

        Both hold views of the weights, so they are made by the first call, and anew where weights have moved.
        """
        layers = self.__dict__.setdefault("_layers", WeakKeyDictionary())
        found = layers.get(weights)
        if found is None or not found[0].unmoved():
            from moe_core.kernels.gemm.fused.layer import FusedLayer
            from moe_core.kernels.gemm.tiles.launch import Activation

            w13, w2 = (self.gemm_weight(name, weights) for name in ("w13", "w2"))
            scheme, activation = self.activation_scheme(weights), Activation.of(self.config)
            places = TensorPlaces(tensor for _, tensor in weights.tensors())
            found = places, FusedLayer(w13, w2, scheme, activation), self.gemv_layer(weights)
            layers[weights] = found
        made: tuple[FusedLayer, GemvLayer | None] = found[1:]
        return made

    def _tokens_alike(self, hidden_states: Tensor, expert_tokens: ExpertTokensMetadata | None) -> int:
        """How many tokens, of which some have no expert here, give the local experts as many rows as the call does.

        No fewer than the call has: its scratch memory may be too small for a plan of fewer (split-K, vectors).
        """
        tokens, mean = hidden_states.shape[-2], None if expert_tokens is None or self.batched else expert_tokens.mean
        if mean is None:
            return tokens
        return max(tokens, round(mean * self.config.num_experts / self.config.top_k))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_layers"}

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

        routing: Routing | Batch
        if not self.batched:
            experts, on_input = self.config.local_experts, self.config.apply_router_weight_on_input
            routing = Routing(topk_ids, topk_weights, experts, expert_map, on_input)
        else:
            routing = Batch(ExpertTokensMetadata.rows_in_use(expert_tokens), hidden_states.shape[1])
        tokens, on_gpu = self._tokens_alike(hidden_states, expert_tokens), hidden_states.device.type != "cpu"
        (layer, gemv), vectors = self.layers(weights), self.gemv_plan(tokens, on_gpu)
        reads = hidden_states_scale is None and gemv is not None and gemv.reads(hidden_states)
        if isinstance(routing, Routing) and gemv is not None and vectors is not None and reads:
            gemv(hidden_states, output, routing=routing, plan=vectors, workspace=workspace)
            return
        plan = self.plan(tokens, on_gpu)
        layer(
            hidden_states,
            output,
            routing=routing,
            plan=plan,
            workspace=workspace,
            lora=lora,
            x_scale=hidden_states_scale,
        )
