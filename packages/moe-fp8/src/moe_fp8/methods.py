"""Whole layers for engines that keep their weights as parameters of a module: create, load, process, apply.

::

    method = ModelOptMxfp8MoEMethod(config)
    method.create_weights(layer)                      # parameters in the checkpoint's layout
    method.load_weight(layer, "w13_weight", tensor, shard_id="w1", expert_id=3)
    ...
    method.process_weights_after_loading(layer)       # select and convert, once; again after a reload
    y = method.apply(layer, x, topk_weights=topk_weights, topk_ids=topk_ids)

A method is thin: the functions of :mod:`moe_fp8.oracle` do the work, and the quant keys alone say what the weights are.

Processing is idempotent.  Parameters that the backend's layout leaves as they are stay the kernel's own memory; others
are freed once they are converted.  To reload, call :meth:`Fp8MoEMethod.create_weights` (which brings freed parameters
back), load every tensor again and process: the kernel's tensors are overwritten in place, so that captured CUDA graphs
go on working.
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
    """One layer's weights as parameters of a module; subclasses say which, and what canonical weights they make.

    ``config`` of the layer, ``selection`` made for it, ``kernel`` once weights were processed.
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
        """Shape and dtype of every parameter, by name."""

    @abstractmethod
    def canonical(self, layer: nn.Module) -> MoEWeights:
        """The canonical weights that the parameters of ``layer`` hold."""

    @property
    def is_monolithic(self) -> bool:
        """Whether the backend routes: :meth:`apply_monolithic`, not :meth:`apply`, runs the layer."""
        return self.selection.experts.is_monolithic

    def create_weights(self, layer: nn.Module, *, device: torch.device | str | None = None) -> None:
        """Register the parameters, in the checkpoint's layout; before a reload, those that were freed.

        They hold NaN until they are loaded.
        """
        for name, (shape, dtype) in self.parameter_specs().items():
            known = getattr(layer, name, None)
            if isinstance(known, nn.Parameter) and name not in self._freed:
                continue
            where = known.device if isinstance(known, nn.Parameter) and device is None else device
            # bytes of ones are NaN in bfloat16, float16, float32, e4m3 and e8m0
            filled = torch.full((*shape, dtype.itemsize), 255, dtype=torch.uint8, device=where)
            layer.register_parameter(name, nn.Parameter(filled.view(dtype).view(shape), requires_grad=False))
        self._freed = frozenset()

    def load_weight(self, layer: nn.Module, name: str, tensor: Tensor, *, shard_id: str, expert_id: int) -> None:
        """Copy one checkpoint tensor to its place.

        ``name`` of the parameter; ``shard_id`` "w1" (gate, or the only matrix of a layer without a gate), "w3" (up) or
        "w2" (down); ``expert_id`` among the local experts.  Raises TensorError for what doesn't fit.
        """
        spec = self.parameter_specs().get(name)
        if spec is None:
            raise TensorError(f"{name} is no weight of this layer; there are {', '.join(self.parameter_specs())}")
        shards = ("w2",) if name.startswith("w2") else ("w1", "w3") if self.config.is_gated else ("w1",)
        if shard_id not in shards:
            raise TensorError(f"{name} holds {' and '.join(shards)}, got shard_id {shard_id!r}")
        if not 0 <= expert_id < self.config.local_experts:
            raise TensorError(f"{name}: expert_id is {expert_id}, expected 0..{self.config.local_experts - 1}")
        parameter: Tensor = getattr(layer, name)
        if name in self._freed:
            raise TensorError(f"{name} was converted and freed: call create_weights before loading it again")
        rows = spec[0][1] // len(shards)
        place = parameter.data[expert_id].narrow(0, _HALVES[shard_id] * rows, rows)
        where = f"{name} ({shard_id} of expert {expert_id})"
        check_shape(where, tensor, tuple(place.shape))
        if tensor.dtype is torch.float8_e8m0fnu:
            tensor = tensor.view(torch.uint8)
        check_dtype(where, tensor, (place.dtype,))
        place.copy_(tensor)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Convert what was loaded to the backend's layout and make the kernel; later, overwrite the kernel's tensors.

        Calling it twice changes nothing.  Raises TensorError, with the kernel as it was, for tensors that were not
        loaded, or hold NaN.
        """
        if self._freed and self.kernel is not None:
            return  # nothing can have been loaded since
        for name in self.parameter_specs():
            _refuse_nan(name, getattr(layer, name).data)
        canonical = self.canonical(layer)
        if canonical.w13_scale is None or canonical.w2_scale is None:
            raise TensorError(f"weights of {canonical.weight_key} have no scales")
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
        """Scales and biases of the kernel."""
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
        """:meth:`moe_core.FusedMoEKernel.apply`; ConfigError where the backend routes by itself."""
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
        """:meth:`moe_core.FusedMoEKernel.apply_monolithic`; ConfigError where the backend does not route."""
        return self._kernel().apply_monolithic(
            x, router_logits=router_logits, correction_bias=correction_bias, expert_map=expert_map, output=output
        )

    def _kernel(self) -> FusedMoEKernel:
        if self.kernel is None:
            raise ConfigError("the layer has no kernel yet: call process_weights_after_loading")
        return self.kernel

    def _free_converted(self, layer: nn.Module, weights: KernelWeights) -> None:
        """Give back parameters whose memory the kernel does not use."""
        used = {tensor.untyped_storage().data_ptr() for _, tensor in weights.tensors()}
        freed = set()
        for name in self.parameter_specs():
            parameter: nn.Parameter = getattr(layer, name)
            if parameter.untyped_storage().data_ptr() not in used:
                parameter.data = parameter.data.new_empty(0)
                freed.add(name)
        self._freed = frozenset(freed)

    def _sizes(self) -> tuple[tuple[str, int, int], ...]:
        """(name, rows, cols) of both weights."""
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
    """MXFP8 as ModelOpt writes it: e4m3 weights, uint8 e8m0 scales of 32 columns, no activation scales.

    Parameters: ``w13_weight`` [E, 2N, K] e4m3 (gate rows first; [E, N, K] without a gate), ``w2_weight`` [E, K, N],
    ``w13_weight_scale`` [E, 2N, K/32] uint8, ``w2_weight_scale`` [E, K, N/32]; with biases ``w13_bias`` [E, 2N],
    ``w2_bias`` [E, K].  ``activation_key`` None: 16-bit activations.
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
    """16-bit parameters that are quantised when they are processed (:mod:`moe_fp8.online`).

    Parameters: ``w13_weight`` [E, 2N, K], ``w2_weight`` [E, K, N] in the config's dtype; with biases ``w13_bias``
    [E, 2N], ``w2_bias`` [E, K].
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
    """TensorError where ``tensor`` [E, ...] holds NaN; looks at one expert at a time, and waits for a GPU once."""
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
