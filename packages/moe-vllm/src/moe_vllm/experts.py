"""moe-core's experts as an experts class of vLLM's modular kernel."""

from __future__ import annotations

import functools
import weakref
from dataclasses import replace
from typing import Any, ClassVar

import torch
from moe_core import ConfigError, FusedMoEKernel, KernelWeights, MoEError, QuantKey, Selection, Workspace, oracle
from moe_core.api.engines import log_once, select_kernel
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat, FusedMoEExpertsModular
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.platforms import current_platform

from moe_vllm.engine import ENGINE, LOGGER
from moe_vllm.layer import layer_config
from moe_vllm.weights import adopt, bound, canonical_weights, stored_group


def log_choice(selection: Selection) -> None:
    """Log which backend runs a layer, once for all equal layers.

    Args:
        selection: the selected backend.
    """
    weights, activations = selection.weight_key, selection.activation_key
    what = f"{selection.report.scheme} experts ({weights} x {activations or '16-bit'})"
    by = f"{selection.backend} ({selection.experts.__name__})"
    log_once(LOGGER, f"{ENGINE.package} runs {what} by {by} on {selection.report.device}")
    LOGGER.debug("%s", selection.report)


class MoeCoreExperts(FusedMoEExpertsModular):
    """Experts of one layer in vLLM's modular kernel.

    vLLM passes a class, not an instance, from its selection to the code that builds the kernel. Therefore every layer
    has a separate class (:meth:`of`), which carries the request and the selection.
    """

    scheme: ClassVar[str]
    #: keys of weights and activations, vLLM's and moe-core's
    asked: ClassVar[tuple[Any, Any]]
    keys: ClassVar[tuple[QuantKey | None, QuantKey | None]]
    #: layer whose parameters hold the weights; None outside of vLLM's own loading
    layer: ClassVar[weakref.ref[torch.nn.Module] | None] = None
    selection: ClassVar[Selection]

    @classmethod
    def of(
        cls,
        scheme: str,
        asked: tuple[Any, Any],
        keys: tuple[QuantKey | None, QuantKey | None],
        layer: torch.nn.Module | None,
    ) -> type[MoeCoreExperts]:
        """Create the class for one layer.

        Args:
            scheme: scheme of moe-core.
            asked: vLLM's keys of weights and activations.
            keys: moe-core's keys of weights and activations.
            layer: layer whose parameters hold the weights.

        Returns:
            A subclass with these attributes.
        """
        body = {
            "__module__": cls.__module__,
            "scheme": scheme,
            "asked": asked,
            "keys": keys,
            "layer": None if layer is None else weakref.ref(layer),
        }
        return type(f"MoeCore{scheme.capitalize()}Experts", (cls,), body)

    # ---- queries of vLLM's selection

    @staticmethod
    def is_supported_config(
        cls: type[MoeCoreExperts],
        moe_config: Any,
        weight_key: Any,
        activation_key: Any,
        activation_format: FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        """Run vLLM's standard checks, then moe-core's selection; return (supported, reasons).

        Args:
            cls: class of one layer.
            moe_config: vLLM's layer configuration.
            weight_key: vLLM's key of the weights.
            activation_key: vLLM's key of the activations.
            activation_format: vLLM's activation format.

        Returns:
            Whether the layer is supported, and the reason if it is not.
        """
        engine = get_current_vllm_config_or_none()
        if engine is not None and engine.parallel_config.enable_elastic_ep:
            return False, "Elastic EP makes experts anew of weights that have a kernel's layout by then"
        supported, reason = FusedMoEExpertsModular.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )
        if not supported:
            return False, reason
        try:
            cls.selection = select_kernel(cls.scheme, layer_config(moe_config), *cls.keys, device=moe_config.device)
        except MoEError as error:
            return False, error.message
        return True, None

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        # vLLM has separate kernels for CPUs; the selection checks which GPU it is
        return bool(current_platform.is_cuda_alike())

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @classmethod
    def _supports_quant_scheme(cls, weight_key: Any, activation_key: Any) -> bool:
        if cls.scheme == "fp8" and current_platform.is_fp8_fnuz():
            return False  # FNUZ codes differ from e4m3
        return (weight_key, activation_key) == cls.asked

    @classmethod
    def _supports_activation(cls, activation: Any) -> bool:
        # gate and up rows alternate in some checkpoints; only the MXFP4 conversion knows in which
        return activation.value != "swigluoai" or cls.scheme == "mxfp4"

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        if moe_parallel_config.use_passthrough_all2all:
            return False  # experts would have to move tokens between ranks themselves
        # what moves tokens between ranks must leave quantization to the experts
        return not moe_parallel_config.use_all2all_kernels or bool(
            moe_parallel_config.use_ag_rs_all2all_kernels
            or moe_parallel_config.use_deepep_ht_kernels
            or moe_parallel_config.use_deepep_v2_kernels
        )

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    # ---- the layer

    def __init__(self, moe_config: Any, quant_config: Any, **batched: int | None) -> None:
        """Convert the weights within vLLM's parameters and build the kernel, before CUDA graphs."""
        super().__init__(moe_config, quant_config, **batched)
        layer = self._present_layer()
        self._names: dict[str, str] = {}
        self._kernel: FusedMoEKernel | None = None
        if layer is not None:
            try:
                converted = self._convert(layer.w13_weight.detach(), layer.w2_weight.detach())
            except MoEError as error:  # vLLM's own experts were already rejected when the layer was created
                reason = f"{self.scheme} experts: {error.message}. {ENGINE.switch}=off leaves them to vLLM"
                raise ConfigError(reason, details=error.details) from error
            self._names = adopt(layer, converted, quant_config)
            self._check_rearranging(converted)
            self._kernel = self._make_kernel(bound(layer, converted, self._names))

    def _present_layer(self) -> Any:
        reference = type(self).layer
        return None if reference is None else reference()

    def _convert(self, w13: Tensor, w2: Tensor, *, shared: bool = False) -> KernelWeights:
        """Convert the weights to the kernel's layout; ``shared``: vLLM keeps the originals.

        The selection is repeated if the loaded weights differ from the request.
        """
        quant, moe = self.quant_config, self.moe_config
        has_bias = quant.w1_bias is not None or quant.w2_bias is not None
        config = layer_config(moe, has_bias=has_bias, params=self.activation_config)
        weight_key, activation_key = self.keys
        if self.scheme == "wna16" and weight_key is not None:
            weight_key = stored_group(weight_key, config.hidden_size, quant.w1_scale)
        # sizes may have been rounded up, and biases found, since the layer was requested
        if (config, weight_key) != (self.selection.config, self.selection.weight_key):
            type(self).selection = select_kernel(self.scheme, config, weight_key, activation_key, device=moe.device)
            log_choice(self.selection)
        weights = canonical_weights(config, weight_key, activation_key, w13, w2, quant)
        return oracle(self.scheme).convert(self.selection, replace(weights, shared=shared))

    def _check_rearranging(self, weights: KernelWeights) -> None:
        """Check that tensors have one slice per expert, since EPLB copies experts between ranks."""
        if self.moe_config.moe_parallel_config.enable_eplb:
            for name, tensor in weights.tensors():
                if tensor.shape[:1] != (self.moe_config.num_local_experts,):
                    raise ConfigError(
                        f"{name} {list(tensor.shape)} of {self.selection.backend} is not per expert, which EPLB needs: "
                        f"{ENGINE.switch}=off leaves the layer to vLLM"
                    )

    def _make_kernel(self, weights: KernelWeights) -> FusedMoEKernel:
        self._workspace_elements = functools.lru_cache(maxsize=None)(self._elements)
        return oracle(self.scheme).make_kernel(self.selection, weights)

    def _bound_kernel(self, w13: Tensor, w2: Tensor) -> FusedMoEKernel:
        """Return the kernel bound to this call's tensors, which vLLM replaces in weight reloads."""
        if self._kernel is None:  # not created by vLLM's loading: the kernel owns the converted weights
            self._kernel = self._make_kernel(self._convert(w13.detach(), w2.detach(), shared=True))
        elif self._names and (w13.data_ptr(), w2.data_ptr()) != self._addresses:
            layer = self._present_layer()
            if layer is not None:
                self._kernel = self._make_kernel(bound(layer, self._kernel.weights, self._names))
        return self._kernel

    @property
    def _addresses(self) -> tuple[int, int]:
        """Addresses of the kernel's w13 and w2; offloading may move one of them alone."""
        if self._kernel is None:
            return 0, 0
        return self._kernel.weights.w13.data_ptr(), self._kernel.weights.w2.data_ptr()

    def _elements(self, num_tokens: int) -> int:
        """Return the kernel's workspace size in elements of the hidden states' dtype."""
        if self._kernel is None:
            return 0
        itemsize: int = self.moe_config.in_dtype.itemsize
        return -(-self._kernel.workspace_nbytes(num_tokens) // itemsize)

    # ---- a call

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, int, int, int, int]:
        """Return (experts, tokens, rows of w13, K, top-k).

        They come from the layer's configuration, since a converted layout may have other shapes.
        """
        config = self.selection.config
        return config.local_experts, a1.shape[0], config.w13_rows, a1.shape[-1], topk_ids.shape[1]

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of two workspaces and the output; the first may alias the output."""
        return (0,), (0,) if self._kernel is None else (self._workspace_elements(M),), (M, K)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write each token's weighted sum of experts to ``output`` [M, K]; see vLLM's base class."""
        if getattr(self, "post_gemm2_hook", None) is not None:
            raise ConfigError(
                f"a function applied to each expert's output is not supported: {ENGINE.switch}=off leaves the "
                "layer to vLLM"
            )
        kernel = self._bound_kernel(w1, w2)
        if apply_router_weight_on_input:  # already applied in the prepare step
            topk_weights = torch.ones_like(topk_weights)
        kernel.workspace = Workspace(workspace2.device, workspace2.view(torch.uint8)) if workspace2.numel() else None
        kernel.apply(
            hidden_states,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            expert_map=expert_map,
            output=output,
            tokens_per_rank=self._brought(expert_tokens_meta),
        )

    def _brought(self, expert_tokens_meta: Any) -> list[int] | None:
        """Return the equivalent number of tokens per rank, if vLLM has counted the rows per expert.

        That many tokens would give the local experts as many rows as the call has: an all-to-all only dispatches tokens
        that have an expert here.
        """
        counts = getattr(expert_tokens_meta, "expert_num_tokens_cpu", None)
        if counts is None or not len(counts):
            return None
        config = self.selection.config
        return [round(int(counts.sum()) * config.num_experts / (len(counts) * config.top_k))]
