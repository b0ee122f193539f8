"""Layer methods for engines with weights as module parameters: create, load, process, apply.

::

    method = ModelOptMxfp8MoEMethod(config)
    method.create_weights(layer)                      # parameters in the checkpoint's layout
    method.load_weight(layer, "w13_weight", tensor, shard_id="w1", expert_id=3)
    ...
    method.process_weights_after_loading(layer)       # select and convert, once; again after a reload
    y = method.apply(layer, x, topk_weights=topk_weights, topk_ids=topk_ids)

A method is a thin wrapper: the functions of :mod:`moe_fp8.oracle` do the work, and the quant keys alone describe the
weights.

Processing is idempotent. Parameters whose layout the backend keeps share the kernel's memory; the others are freed once
converted. To reload, call :meth:`Fp8MoEMethod.create_weights` (which restores freed parameters), load every tensor
again and process. The kernel's tensors are then overwritten in place, so captured CUDA graphs stay valid.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from moe_core import (
    ConfigError,
    FusedMoEConfig,
    FusedMoEKernel,
    FusedMoEQuantConfig,
    KernelWeights,
    MoEWeights,
    Selection,
    TensorError,
    check_dtype,
    check_shape,
    kMxfp8Dynamic,
    registry,
    scale_shape,
)
from torch import Tensor, nn

from moe_fp8.oracle import (
    convert_to_fp8_moe_kernel_format,
    make_fp8_moe_kernel,
    select_fp8_moe_backend,
    select_mxfp8_moe_backend,
)

if TYPE_CHECKING:
    from moe_core import FusedMoEPrepareAndFinalizeModular, OnlineQuantization, QuantKey

    from moe_fp8.scheme import Fp8MoeBackend

#: Half of w13 that a shard fills (w1: gate, w3: up); w2 has no halves.
_HALVES = {"w1": 0, "w3": 1, "w2": 0}


class Fp8MoEMethod(ABC):
    """Base of methods that hold one layer's weights as module parameters.

    Subclasses define the parameters and the canonical weights built from them.

    Attributes:
        config: configuration of the layer.
        selection: backend selected for the layer.
        kernel: the kernel; None until weights are processed.
    """

    def __init__(
        self,
        config: FusedMoEConfig,
        selection: Selection,
        *,
        prepare_finalize: FusedMoEPrepareAndFinalizeModular | None = None,
    ) -> None:
        self.config = config
        self.selection = selection
        self.kernel: FusedMoEKernel | None = None
        self._prepare_finalize = prepare_finalize
        self._freed: frozenset[str] = frozenset()

    @abstractmethod
    def parameter_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of every parameter, by name."""

    @abstractmethod
    def canonical(self, layer: nn.Module) -> MoEWeights:
        """Return the canonical weights held by the parameters of ``layer``.

        Args:
            layer: module that owns the parameters.
        """

    @property
    def is_monolithic(self) -> bool:
        """Whether the backend routes, so that :meth:`apply_monolithic` replaces :meth:`apply`."""
        return self.selection.experts.is_monolithic

    def create_weights(self, layer: nn.Module, *, device: torch.device | str | None = None) -> None:
        """Register parameters in the checkpoint's layout; before a reload, restore freed ones.

        They hold NaN until loaded.

        Args:
            layer: module that owns the parameters.
            device: where to allocate; by default the device of the existing parameter.
        """
        for name, (shape, dtype) in self.parameter_specs().items():
            known = getattr(layer, name, None)
            if isinstance(known, nn.Parameter) and name not in self._freed:
                continue
            where = known.device if isinstance(known, nn.Parameter) and device is None else device
            # all-ones bytes are NaN in bfloat16, float16, float32, e4m3 and e8m0
            filled = torch.full((*shape, dtype.itemsize), 255, dtype=torch.uint8, device=where)
            layer.register_parameter(name, nn.Parameter(filled.view(dtype).view(shape), requires_grad=False))
        self._freed = frozenset()

    def load_weight(self, layer: nn.Module, name: str, tensor: Tensor, *, shard_id: str, expert_id: int) -> None:
        """Copy one checkpoint tensor into its parameter.

        Args:
            layer: module that owns the parameters.
            name: parameter name.
            tensor: checkpoint tensor.
            shard_id: "w1" (gate, or the only matrix of an ungated layer), "w3" (up) or "w2" (down).
            expert_id: index among the local experts.

        Raises:
            TensorError: name, shard, expert, shape or dtype do not match the layer.
        """
        spec = self.parameter_specs().get(name)
        if spec is None:
            raise TensorError(
                f"{name} is not a parameter of this layer; expected one of {', '.join(self.parameter_specs())}"
            )
        shards = ("w2",) if name.startswith("w2") else ("w1", "w3") if self.config.is_gated else ("w1",)
        if shard_id not in shards:
            raise TensorError(f"shard_id {shard_id!r} is invalid for {name}; expected {' or '.join(shards)}")
        if not 0 <= expert_id < self.config.local_experts:
            raise TensorError(f"{name}: expert_id is {expert_id}, expected 0..{self.config.local_experts - 1}")
        parameter: Tensor = getattr(layer, name)
        if name in self._freed:
            raise TensorError(f"{name} has been converted and freed: call create_weights() before loading it again")
        rows = spec[0][1] // len(shards)
        place = parameter.data[expert_id].narrow(0, _HALVES[shard_id] * rows, rows)
        where = f"{name} ({shard_id} of expert {expert_id})"
        check_shape(where, tensor, tuple(place.shape))
        if tensor.dtype is torch.float8_e8m0fnu:
            tensor = tensor.view(torch.uint8)
        check_dtype(where, tensor, (place.dtype,))
        place.copy_(tensor)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Convert the loaded weights to the backend's layout and create the kernel.

        Later calls overwrite the kernel's tensors. A second call without a reload changes nothing.

        Args:
            layer: module that owns the parameters.

        Raises:
            TensorError: a tensor was not loaded or holds NaN; the kernel is unchanged.
        """
        if self._freed and self.kernel is not None:
            return  # nothing can have been loaded since
        for name in self.parameter_specs():
            _refuse_nan(name, getattr(layer, name).data)
        canonical = self.canonical(layer)
        if canonical.w13_scale is None or canonical.w2_scale is None:
            raise TensorError(f"w13_scale or w2_scale is missing, but weight_key is {canonical.weight_key}")
        weights = convert_to_fp8_moe_kernel_format(
            self.selection,
            w13=canonical.w13,
            w2=canonical.w2,
            w13_scale=canonical.w13_scale,
            w2_scale=canonical.w2_scale,
            w13_bias=canonical.w13_bias,
            w2_bias=canonical.w2_bias,
        )
        if self.kernel is None:
            self.kernel = make_fp8_moe_kernel(self.selection, weights, prepare_finalize=self._prepare_finalize)
        else:
            self.kernel.weights.copy_(weights)
        self._free_converted(layer, self.kernel.weights)

    def get_fused_moe_quant_config(self) -> FusedMoEQuantConfig:
        """Return the kernel's scales and biases."""
        return self._kernel().weights.quant_config

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        *,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None = None,
        output: Tensor | None = None,
    ) -> Tensor:
        """Run the layer with the router's choice; see :meth:`moe_core.FusedMoEKernel.apply`.

        Args:
            layer: module that owns the parameters.
            x: hidden states [M, K].
            topk_weights: router weights [M, k].
            topk_ids: expert ids [M, k].
            expert_map: local index of each expert, as in the kernel's method.
            output: where to write the result, as in the kernel's method.

        Returns:
            Output [M, K].

        Raises:
            ConfigError: the backend does its own routing, or weights are not processed yet.
        """
        return self._kernel().apply(
            x, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, output=output
        )

    def apply_monolithic(
        self,
        layer: nn.Module,
        x: Tensor,
        *,
        router_logits: Tensor,
        correction_bias: Tensor | None = None,
        expert_map: Tensor | None = None,
        output: Tensor | None = None,
    ) -> Tensor:
        """Run the layer including routing; see :meth:`moe_core.FusedMoEKernel.apply_monolithic`.

        Args:
            layer: module that owns the parameters.
            x: hidden states [M, K].
            router_logits: logits [M, E] of the router.
            correction_bias: bias of the router's selection, as in the kernel's method.
            expert_map: local index of each expert, as in the kernel's method.
            output: where to write the result, as in the kernel's method.

        Returns:
            Output [M, K].

        Raises:
            ConfigError: the backend does not do the routing, or weights are not processed yet.
        """
        return self._kernel().apply_monolithic(
            x, router_logits=router_logits, correction_bias=correction_bias, expert_map=expert_map, output=output
        )

    def _kernel(self) -> FusedMoEKernel:
        if self.kernel is None:
            raise ConfigError("the layer has no kernel yet: call process_weights_after_loading")
        return self.kernel

    def _free_converted(self, layer: nn.Module, weights: KernelWeights) -> None:
        """Free parameters whose memory the kernel does not use."""
        used = {tensor.untyped_storage().data_ptr() for _, tensor in weights.tensors()}
        freed = set()
        for name in self.parameter_specs():
            parameter: nn.Parameter = getattr(layer, name)
            if parameter.untyped_storage().data_ptr() not in used:
                parameter.data = parameter.data.new_empty(0)
                freed.add(name)
        self._freed = frozenset(freed)

    def _sizes(self) -> tuple[tuple[str, int, int], ...]:
        """Return (name, rows, columns) of both weights."""
        config = self.config
        return (
            ("w13", config.w13_rows, config.hidden_size),
            ("w2", config.hidden_size, config.intermediate_size),
        )

    def _biases(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        if not self.config.has_bias:
            return {}
        return {
            f"{name}_bias": ((self.config.local_experts, rows), self.config.dtype) for name, rows, _ in self._sizes()
        }


class ModelOptMxfp8MoEMethod(Fp8MoEMethod):
    """Layer method for ModelOpt's MXFP8: e4m3 weights, uint8 e8m0 scales per 32 columns.

    Parameters of the layer:

    - ``w13_weight`` e4m3 [E, 2N, K] (gate rows first; [E, N, K] if ungated), ``w2_weight`` e4m3 [E, K, N]
    - ``w13_weight_scale`` uint8 [E, 2N, K/32], ``w2_weight_scale`` uint8 [E, K, N/32]
    - with biases ``w13_bias`` [E, 2N], ``w2_bias`` [E, K]

    Args:
        config: configuration of the layer.
        activation_key: quantization of the activations; None for 16-bit activations.
        moe_backend: name of the backend, or "auto".
        device: device to select a backend for.
        prepare_finalize: dispatch and combine steps around the experts.
    """

    def __init__(
        self,
        config: FusedMoEConfig,
        *,
        activation_key: QuantKey | str | None = kMxfp8Dynamic,
        moe_backend: str | Fp8MoeBackend = "auto",
        device: torch.device | str | None = None,
        prepare_finalize: FusedMoEPrepareAndFinalizeModular | None = None,
    ) -> None:
        selection = select_mxfp8_moe_backend(
            config, activation_key=activation_key, moe_backend=moe_backend, device=device
        )
        super().__init__(config, selection, prepare_finalize=prepare_finalize)

    def parameter_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        key, experts = self.selection.weight_key, self.config.local_experts
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, rows, cols in self._sizes():
            specs[f"{name}_weight"] = ((experts, rows, cols), torch.float8_e4m3fn)
            if key is not None:
                specs[f"{name}_weight_scale"] = (scale_shape(key, experts, rows, cols), key.scale.dtype)
        return specs | self._biases()

    def canonical(self, layer: nn.Module) -> MoEWeights:
        biases = {name: getattr(layer, name).data for name in self._biases()}
        return MoEWeights(
            weight_key=self.selection.weight_key,
            activation_key=self.selection.activation_key,
            w13=layer.w13_weight.data,  # type: ignore[arg-type]
            w2=layer.w2_weight.data,  # type: ignore[arg-type]
            w13_scale=layer.w13_weight_scale.data,  # type: ignore[arg-type]
            w2_scale=layer.w2_weight_scale.data,  # type: ignore[arg-type]
            **biases,
        )


class Fp8OnlineMoEMethod(Fp8MoEMethod):
    """16-bit parameters that are quantized when they are processed (:mod:`moe_fp8.online`).

    Parameters of the layer: ``w13_weight`` [E, 2N, K] and ``w2_weight`` [E, K, N] in the config's dtype; with biases
    ``w13_bias`` [E, 2N] and ``w2_bias`` [E, K].

    Args:
        config: configuration of the layer.
        quantize: name of an online quantization, or the quantization itself.
        moe_backend: name of the backend, or "auto".
        device: device to select a backend for.
        prepare_finalize: dispatch and combine steps around the experts.
    """

    def __init__(
        self,
        config: FusedMoEConfig,
        quantize: str | OnlineQuantization = "fp8_per_channel",
        *,
        moe_backend: str | Fp8MoeBackend = "auto",
        device: torch.device | str | None = None,
        prepare_finalize: FusedMoEPrepareAndFinalizeModular | None = None,
    ) -> None:
        self.online = registry().online(quantize)
        selection = select_fp8_moe_backend(
            config,
            weight_key=self.online.weight_key,
            activation_key=self.online.activation_key,
            moe_backend=moe_backend,
            device=device,
        )
        super().__init__(config, selection, prepare_finalize=prepare_finalize)

    def parameter_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        weights = {
            f"{name}_weight": ((self.config.local_experts, rows, cols), self.config.dtype)
            for name, rows, cols in self._sizes()
        }
        return weights | self._biases()

    def canonical(self, layer: nn.Module) -> MoEWeights:
        biases = {name: getattr(layer, name).data for name in self._biases()}
        stored = MoEWeights(
            weight_key=None,
            activation_key=None,
            w13=layer.w13_weight.data,  # type: ignore[arg-type]
            w2=layer.w2_weight.data,  # type: ignore[arg-type]
            **biases,
        )
        return self.online.quantize(stored)


def _refuse_nan(name: str, tensor: Tensor) -> None:
    """Raise TensorError if ``tensor`` [E, ...] holds NaN.

    Checks expert by expert, with one GPU synchronization.
    """
    if not tensor.numel():
        return
    flags = []
    for one in tensor:
        if one.dtype is torch.float8_e4m3fn:
            flags.append(((one.view(torch.uint8) & 0x7F) == 0x7F).any())
        else:
            flags.append((one == 255).any() if one.dtype is torch.uint8 else one.isnan().any())
    bad = torch.stack(flags).nonzero().flatten().tolist()
    if bad:
        experts = ", ".join(map(str, bad[:8])) + (" …" if len(bad) > 8 else "")
        raise TensorError(f"{name} of expert {experts} was not loaded, or holds NaN")
