"""One MoE layer as a torch module: load, convert, route, apply, reload."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_core._support.autocast import autocast_off, is_autocast, without_autocast
from moe_core._support.fake import is_fake
from moe_core.errors import (
    ConfigError,
    MoEError,
    TensorError,
    check_dtype,
    check_instance,
    check_shape,
    check_tensor,
)
from moe_core.interface.call_arguments import check_beside, check_width, refuse_gradients
from moe_core.kernels.launch.compile_ahead import Progress
from moe_core.layer.conversion import check_before_apply, check_before_load
from moe_core.layer.recipe import completed, recipe_of
from moe_core.layer.replacement import find_replacement, quantize_like, router_of
from moe_core.layer.request import LayerRequest
from moe_core.layer.router_product import fixed_rows_product
from moe_core.layer.state_dicts import ExpertsForm, experts_of, leave_out
from moe_core.parallel.shard import local_expert_range, map_of
from moe_core.runtime.kernel import FusedMoEKernel
from moe_core.runtime.kernel_call import KernelCall
from moe_core.selection.oracle import Oracle
from moe_core.selection.registry import registry
from moe_core.selection.report import Selection
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.lora import LoRAWeights
from moe_core.spec.routing import LOGIT_DTYPES, RoutingConfig
from moe_core.spec.weights import KernelWeights, MoEWeights, check_writable

if TYPE_CHECKING:
    from moe_core.checkpoint import Checkpoint
    from moe_core.kernels.ops.online import OnlineQuantization
    from moe_core.parallel.distributed.groups import ParallelGroups
    from moe_core.parallel.placement.placement import ExpertPlacement
    from moe_core.spec.quant_key import QuantKey


class FusedMoELayer(nn.Module):
    """The routed experts of one layer, ready to run.

    ``FusedMoELayer.from_weights`` selects a backend for canonical weights and converts them; :func:`load_layer` does so
    for a checkpoint. The weights are stored in the backend's layout and are not parameters.

    ``copy.deepcopy``, ``pickle`` and ``torch.save`` of the layer, or of a model that contains it, keep everything.
    ``state_dict()`` omits the experts and issues an ExpertsLeftOutWarning, because no checkpoint has a backend's
    layout. Functions that write or offload a whole model (``save_pretrained``, ``Trainer.save_model``, ``cpu_offload``)
    raise ConfigError; use :func:`experts_left_out` to write everything but the experts. ``load_state_dict()`` reloads
    experts that a state dict contains, and keeps the current ones if it contains none. It raises ConfigError if they do
    not fit, even with ``strict=False``, before any module of the model is changed.

    ``.to()``, ``.half()`` and similar calls on a model that contains the layer raise ConfigError if they would change
    the device or dtype of the layer. They raise before anything is changed.
    """

    #: Whether ``state_dict()`` omits the experts without a warning; see :func:`experts_left_out`.
    state_dict_without_experts = False

    def __init__(
        self,
        kernel: FusedMoEKernel,
        selection: Selection,
        *,
        routing: RoutingConfig | None = None,
        router_weight: Tensor | None = None,
        router_bias: Tensor | None = None,
        correction_bias: Tensor | None = None,
        expert_map: Tensor | None = None,
        owns_weights: bool = False,
        request: LayerRequest | None = None,
        routing_reason: str | None = None,
    ) -> None:
        """Build a layer from a kernel and optional router tensors.

        With ``router_weight``, :meth:`forward` can compute the routing on its own. All tensors must be on the device of
        the kernel's weights.

        Args:
            kernel: Kernel with the converted weights.
            selection: Selection that the kernel was made from.
            routing: How experts are chosen from logits. Default: that of the kernel's config.
            router_weight: Router weight ``[E, K]``.
            router_bias: Router bias ``[E]``.
            correction_bias: Correction bias for expert selection, ``[E]``.
            expert_map: Local index of each global expert, int32 ``[E]``; -1 for experts of other ranks.
            owns_weights: Whether nothing else references the kernel's tensors, so that :meth:`reload` may overwrite
                them. The layer then copies the router's tensors, which it overwrites too.
            request: How the weights were loaded and quantized; a reload repeats it.
            routing_reason: Why the layer has no routing, if it has none.
        """
        super().__init__()
        check_instance("kernel", kernel, FusedMoEKernel)
        check_instance("routing", routing, RoutingConfig, type(None))
        self.kernel = kernel
        self.selection = selection
        self.routing = routing or kernel.config.routing
        copied = _own if owns_weights else _same
        self.router_weight = copied(router_weight)
        self.router_bias = copied(router_bias)
        self.correction_bias = copied(correction_bias)
        self.expert_map = expert_map
        self.owns_weights = owns_weights
        self.request = request or LayerRequest()
        self.routing_reason = routing_reason
        self._check_tensors()

    def _check_tensors(self) -> None:
        """Raise TensorError for routing tensors or a map that do not fit the layer."""
        experts, hidden = self.config.num_experts, self.config.hidden_size
        for name, shape, dtypes in (
            ("router_weight", (experts, hidden), LOGIT_DTYPES),
            ("router_bias", (experts,), LOGIT_DTYPES),
            ("correction_bias", (experts,), LOGIT_DTYPES),
            ("expert_map", (experts,), (torch.int32,)),
        ):
            tensor: Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            check_shape(name, tensor, shape)
            check_dtype(name, tensor, dtypes)
            if tensor.device != self.weights.device:
                raise TensorError(f"{name} is on {tensor.device}, the layer's weights are on {self.weights.device}")
        movement = self.kernel.prepare_finalize
        over_ranks = movement is not None and movement.groups is not None and not movement.maps_experts
        if self.expert_map is None and over_ranks and self.config.local_experts < experts:
            raise TensorError(
                f"expert_map [{experts}] is missing: this rank holds {self.config.local_experts} of {experts} experts"
            )
        if self.expert_map is not None and self.expert_map.device.type != "meta":
            place, local = int(self.expert_map.max()), self.config.local_experts
            if place >= local:
                raise TensorError(f"expert_map contains {place}, expected -1 or a local expert from 0 to {local - 1}")
            self._check_placed(self.expert_map)

    def _check_placed(self, expert_map: Tensor) -> None:
        """Raise ConfigError if ``expert_map`` contradicts the placement used by dispatch."""
        movement, rank = self.kernel.prepare_finalize, self.config.parallel.ep_rank
        if movement is None or not movement.maps_experts or movement.placement is None:
            return
        if not torch.equal(expert_map.cpu(), movement.placement.expert_map(rank)):
            raise ConfigError(
                f"expert_map says that ep_rank {rank} holds the experts {self._mapped()}, but tokens are sent to "
                f"it for {list(movement.placement.ranks[rank])}: pass the placement= from which the experts were "
                "selected"
            )

    def _mapped(self) -> list[int] | None:
        """Global ids of the experts that the map places here, in local order; None without a map."""
        if self.expert_map is None:
            return None
        places = {place: expert for expert, place in enumerate(self.expert_map.tolist()) if place >= 0}
        return [places[place] for place in sorted(places)]

    @staticmethod
    @without_autocast
    def from_weights(
        scheme: str | Oracle,
        config: FusedMoEConfig,
        weights: MoEWeights,
        *,
        backend: str = "auto",
        router_weight: Tensor | None = None,
        router_bias: Tensor | None = None,
        correction_bias: Tensor | None = None,
        expert_map: Tensor | None = None,
        copy: bool = False,
        quantize: str | OnlineQuantization | None = None,
        groups: ParallelGroups | None = None,
        placement: ExpertPlacement | None = None,
    ) -> FusedMoELayer:
        """Select a backend for the device of ``weights``, convert them and build the layer.

        If a backend's layout is the canonical one, the layer uses the tensors of ``weights`` themselves, unless
        ``copy`` is set.

        Args:
            scheme: Name of a scheme, or its oracle.
            config: Config of the layer; with ``groups``, that of this rank's shard.
            weights: Canonical weights; with ``groups``, this rank's shard (:func:`moe_core.shard_layer`).
            backend: Backend name, or "auto".
            router_weight: Router weight ``[E, K]``.
            router_bias: Router bias ``[E]``.
            correction_bias: Correction bias for expert selection, ``[E]``.
            expert_map: Local index of each global expert, int32 ``[E]``. Without it and ``placement``, groups place
                consecutive experts on each rank.
            copy: Whether the layer owns copies of the tensors, which :meth:`reload` requires.
            quantize: Online quantization of 16-bit ``weights``, by the name that the scheme gives it
                ("fp8_per_channel").
            groups: Process groups of a layer that spans several ranks. Outputs are then complete, as described in
                :meth:`moe_core.Oracle.make_kernel`.
            placement: Placement of experts on the ranks of ``groups``.

        Returns:
            The layer.

        Raises:
            ConfigError: Invalid scheme or quantization, or a map that contradicts the config.
            TensorError: Weights that are not canonical or have no values (meta device, FakeTensorMode).
        """
        if not isinstance(scheme, str | Oracle):
            raise ConfigError(f"scheme is {scheme!r}, expected a name ({', '.join(registry().scheme_names())})")
        if not isinstance(weights, MoEWeights):
            raise TensorError(f"weights is {type(weights).__name__}, expected canonical weights: MoEWeights(w13=…)")
        check_tensor("w13", weights.w13)
        if weights.w13.is_meta:
            raise TensorError("w13 is on the meta device: it has no values to convert")
        if is_fake(weights.w13):
            raise TensorError("w13 has no values to convert: make the layer outside of FakeTensorMode, call it within")
        check_instance("copy", copy, bool)
        oracle = registry().oracle(scheme) if isinstance(scheme, str) else scheme
        online = None if quantize is None else registry().online(quantize)
        if online is not None and online.scheme != oracle.scheme:
            raise ConfigError(f"{online.name} makes weights of the scheme {online.scheme}, not of {oracle.scheme}")
        selection = oracle.select(
            config,
            weight_key=weights.weight_key if online is None else online.weight_key,
            activation_key=weights.activation_key if online is None else online.activation_key,
            moe_backend=backend,
            device=weights.w13.device,
        )
        lora = LoRAWeights.zeros(config, weights.w13.device) if config.is_lora_enabled else None
        if online is not None:
            weights.validate(config)
        quantized = weights if online is None else online.quantize(weights)
        converted = oracle.convert(selection, replace(quantized, shared=quantized.shared and not copy))
        kernel = oracle.make_kernel(
            selection, converted.apart_from(weights) if copy else converted, groups=groups, placement=placement
        )
        kernel.lora = lora
        if expert_map is None and groups is not None and placement is None:
            expert_map = _consecutive(kernel)
        return FusedMoELayer(
            kernel,
            selection,
            router_weight=router_weight,
            router_bias=router_bias,
            correction_bias=correction_bias,
            expert_map=expert_map,
            owns_weights=copy,
            request=LayerRequest(online=online),
        )

    @property
    def config(self) -> FusedMoEConfig:
        """The config of the layer on this rank."""
        return self.kernel.config

    @property
    def weights(self) -> KernelWeights:
        """The weights in the layout of the selected backend."""
        return self.kernel.weights

    @property
    def lora(self) -> LoRAWeights | None:
        """Slots for LoRA adapters; None unless the layer's config enables them."""
        return self.kernel.lora

    def route(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts from router logits by the layer's routing.

        Args:
            router_logits: ``[M, E]``.

        Returns:
            topk_weights float32 ``[M, k]`` and topk_ids int32 ``[M, k]``.

        Raises:
            ConfigError: The layer has no routing.
        """
        routing = self._own_routing()
        check_shape("router_logits", router_logits, ("M", self.config.num_experts))
        from moe_core.kernels.ops.routing import fused_route

        return fused_route(router_logits, top_k=self.config.top_k, config=routing, correction_bias=self.correction_bias)

    def _own_routing(self) -> RoutingConfig:
        if self.routing is None:
            why = self.routing_reason or "its config has no routing="
            raise ConfigError(f"the layer has no routing: pass topk_weights and topk_ids; {why}")
        return self.routing

    def forward(
        self,
        hidden_states: Tensor,
        *,
        router_logits: Tensor | None = None,
        topk_weights: Tensor | None = None,
        topk_ids: Tensor | None = None,
        adapter_ids: Tensor | None = None,
        tokens_per_rank: Sequence[int] | None = None,
    ) -> Tensor:
        """Compute the weighted sum of the routed experts.

        Routing comes from ``topk_weights`` and ``topk_ids`` if given, otherwise from ``router_logits``, otherwise from
        the layer's own router weight.

        For inference only: there are no gradients. Under ``torch.autocast``, hidden states in another dtype than the
        layer's are cast to it and the result is cast back; autocast has no other effect.

        Args:
            hidden_states: ``[..., K]``.
            router_logits: ``[M, E]``.
            topk_weights: ``[M, k]``.
            topk_ids: ``[M, k]``.
            adapter_ids: Adapter of each token in :attr:`lora`, int32 ``[M]``.
            tokens_per_rank: Number of tokens that each rank brings, if tokens cross ranks
                (:meth:`moe_core.FusedMoEKernel.apply`).

        Returns:
            Tensor of the shape of ``hidden_states``. If ranks split the rows of the output, this rank's rows, ``[M',
            K]``.

        Raises:
            TensorError: Arguments of the wrong shape, dtype or device, or that require grad outside
                ``torch.no_grad()``.
        """
        # The kernel checks a matrix that comes with its routing. Under torch.compile the operator checks it.
        checked: Any = hidden_states
        checked_later = topk_ids is not None and isinstance(checked, Tensor) and checked.dim() == 2
        if not (checked_later or torch.compiler.is_compiling()):
            check_width(hidden_states, self.config, "...")
        if torch.is_grad_enabled():
            refuse_gradients(hidden_states=hidden_states, router_logits=router_logits, topk_weights=topk_weights)
        given = hidden_states.dtype
        if given is not self.config.dtype and is_autocast(hidden_states):
            hidden_states = hidden_states.to(self.config.dtype)
        x = hidden_states if hidden_states.dim() == 2 else hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen = self._routed(x, router_logits, topk_weights, topk_ids)
        if isinstance(chosen, Tensor):
            if adapter_ids is not None:
                raise ConfigError(
                    f"{self.selection.backend} is monolithic (it routes itself) and does not support LoRA adapters"
                )
            out = self.kernel.apply_monolithic(
                x, router_logits=chosen, correction_bias=self.correction_bias, expert_map=self.expert_map
            )
        else:
            out = self.kernel.apply(
                x,
                topk_weights=chosen[0],
                topk_ids=chosen[1],
                expert_map=self.expert_map,
                adapter_ids=adapter_ids,
                tokens_per_rank=tokens_per_rank,
            )
        out = out.to(given)
        return out if x is hidden_states or self.kernel.shares_out else out.view(hidden_states.shape)

    def start(
        self,
        hidden_states: Tensor,
        *,
        router_logits: Tensor | None = None,
        topk_weights: Tensor | None = None,
        topk_ids: Tensor | None = None,
        adapter_ids: Tensor | None = None,
        tokens_per_rank: Sequence[int] | None = None,
    ) -> KernelCall:
        """Begin a call that runs in steps, between which other work can run.

        Steps are those of :meth:`moe_core.FusedMoEKernel.start`. Shared experts or other micro-batches can run between
        them.

        Args:
            hidden_states: ``[M, K]``.
            router_logits: As in :meth:`forward`.
            topk_weights: As in :meth:`forward`.
            topk_ids: As in :meth:`forward`.
            adapter_ids: As in :meth:`forward`.
            tokens_per_rank: As in :meth:`forward`.

        Returns:
            The call in flight.

        Raises:
            ConfigError: The experts are monolithic: they compute the routing themselves.
        """
        check_width(hidden_states, self.config)
        chosen = self._routed(hidden_states, router_logits, topk_weights, topk_ids)
        if isinstance(chosen, Tensor):
            raise ConfigError(
                f"{self.selection.backend} is monolithic (it routes itself) and has no separate steps; call the layer"
            )
        return self.kernel.start(
            hidden_states,
            topk_weights=chosen[0],
            topk_ids=chosen[1],
            expert_map=self.expert_map,
            adapter_ids=adapter_ids,
            tokens_per_rank=tokens_per_rank,
        )

    def _routed(
        self, x: Tensor, router_logits: Tensor | None, topk_weights: Tensor | None, topk_ids: Tensor | None
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Return (topk_weights, topk_ids), given or computed; the logits for monolithic experts."""
        if (topk_weights is None) != (topk_ids is None):
            missing = "topk_ids" if topk_ids is None else "topk_weights"
            raise TensorError(f"{missing} is missing: pass both topk_weights and topk_ids")
        if topk_weights is not None and topk_ids is not None:
            return topk_weights, topk_ids
        self._own_routing()
        if router_logits is None:
            router_logits = self.router_logits(x)
        else:
            check_shape("router_logits", router_logits, (x.shape[0], self.config.num_experts))
            if not torch.compiler.is_compiling():
                check_beside(x, "router_logits", router_logits)
        if self.kernel.is_monolithic:
            return router_logits
        return self.route(router_logits)

    def warm_up(self, max_tokens: int, *, progress: Progress | None = None) -> int:
        """Compile the kernels for calls with up to ``max_tokens`` tokens.

        This is :func:`moe_core.warm_up` of this layer alone.

        Args:
            max_tokens: Largest number of tokens of a call.
            progress: Callback that gets the number of ready kernels and their total.

        Returns:
            Number of compiled kernels.
        """
        from moe_core.runtime.compile_calls import compile_calls

        return compile_calls([(self.kernel, self)], max_tokens, progress=progress)

    def router_logits(self, x: Tensor) -> Tensor:
        """Compute router logits from the layer's router weight and bias.

        Args:
            x: ``[M, K]``.

        Returns:
            float32 ``[M, E]``.

        Raises:
            TensorError: The layer has no router weight, or ``x`` does not fit.
        """
        if self.router_weight is None:
            raise TensorError("router_weight is missing: pass router_logits, or topk_weights and topk_ids")
        check_width(x, self.config)
        if torch.is_grad_enabled():
            refuse_gradients(hidden_states=x, router_weight=self.router_weight, router_bias=self.router_bias)
        if not torch.compiler.is_compiling():
            check_beside(x, "router_weight", self.router_weight)
        with autocast_off(x.device.type):
            weight = self.router_weight.float().T
            if self.config.batch_invariant:
                logits = fixed_rows_product(x.float(), weight)
            else:
                logits = x.float() @ weight
            return logits if self.router_bias is None else logits + self.router_bias.float()

    @without_autocast
    @torch.no_grad()
    def reload(self, weights: MoEWeights | Checkpoint | str | os.PathLike[str], *, layer: int | None = None) -> None:
        """Replace the weights in place: pointers stay, captured CUDA graphs remain valid.

        16-bit weights are quantized as the layer's are: as at load, or by the keys of the checkpoint that it came from.

        Args:
            weights: Canonical weights, or a checkpoint (folder) with the same layer. From a checkpoint the router is
                reloaded too if this layer has one.
            layer: Index of the layer in the checkpoint. Default: the one that this layer was loaded from.

        Raises:
            TensorError: The new weights do not fit; the old weights are untouched.
            CheckpointError: The checkpoint cannot be read.
            ConfigError: The checkpoint's layer differs, or this layer shares its tensors with the caller that
                created them, and the reload would overwrite these.
        """
        self._check_owned()
        router: dict[str, Tensor] = {}
        if not isinstance(weights, MoEWeights):
            from moe_core.checkpoint import Checkpoint

            check_instance("weights", weights, MoEWeights, Checkpoint, str, os.PathLike)
            request = replace(self.request, experts=self._held())
            request = request if layer is None else replace(request, layer=layer)
            source, quantized = find_replacement(
                weights, request, self.config, self.selection, routed=self.routing is not None
            )
            held = {name: getattr(self, name) for name in ("router_weight", "router_bias", "correction_bias")}
            router = router_of(source, held)
            weights = source.weights(device=self.weights.device)
            if quantized:
                weights = completed(weights, self.selection, self.config, self.weights.quant_config)
        elif layer is not None:
            raise ConfigError("layer= needs a checkpoint; canonical weights are those of one layer")
        if weights.weight_key is None:
            weights = quantize_like(weights, self.config, self.selection, self.request.online, self.weights)
        self._check_keys(weights)
        weights.validate(self.config)
        # The layer owns its tensors, so they have the layout of tensors that are not shared.
        ready = replace(weights.to(self.weights.device).detached().row_major(), shared=False)
        converted = self.kernel.experts.convert(ready)
        # Everything that can fail must come before the first write, in copy_.
        for name in router:
            check_writable(name, getattr(self, name))
        self.kernel.weights.copy_(converted)
        for name, tensor in router.items():
            getattr(self, name).copy_(tensor)

    def _check_owned(self) -> None:
        """Raise ConfigError if reloading could overwrite tensors of the caller."""
        if not self.owns_weights:
            raise ConfigError(
                "the layer may share its weights with their owner, and reloading would overwrite them: build it with "
                "load_layer, with FusedMoELayer.from_weights(..., copy=True) or with owns_weights=True"
            )

    def _check_keys(self, weights: MoEWeights) -> None:
        """Raise TensorError if new weights have other keys than the layer."""
        new, own = (
            (weights.weight_key, weights.activation_key),
            (self.selection.weight_key, self.selection.activation_key),
        )
        if new != own:
            raise TensorError(f"the layer was built for {_keys(*own)}, the new weights are {_keys(*new)}")

    def _held(self) -> list[int] | None:
        """Global ids of the local experts, in local order; None for all experts."""
        movement = self.kernel.prepare_finalize
        if movement is not None and movement.maps_experts and movement.placement is not None:
            # Experts may have moved since the map was made.
            return list(movement.placement.ranks[self.config.parallel.ep_rank])
        return self._mapped()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not self.state_dict_without_experts:
            leave_out(destination, prefix)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def check_state_dict(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Check the experts in a state dict that is about to be loaded into a model with this layer.

        Args:
            state_dict: State dict of the model.
            prefix: Prefix of the layer's names.

        Raises:
            ConfigError: As in :meth:`load_experts`.
        """
        self.check_experts(self._experts_in(state_dict, prefix), prefix)

    def _experts_in(self, state_dict: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Return the entries below ``prefix`` that are not the layer's own parameters or buffers."""
        own = {name for name, _ in self.named_parameters()} | {name for name, _ in self.named_buffers()}
        below = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)}
        return {name: tensor for name, tensor in below.items() if name not in own}

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        given = self._experts_in(state_dict, prefix)
        own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        found = {name: state_dict[f"{prefix}{name}"] for name in own if f"{prefix}{name}" in state_dict}
        # torch reports a router of another shape once everything else is loaded; experts must not be replaced then.
        if all(isinstance(tensor, Tensor) and tensor.shape == own[name].shape for name, tensor in found.items()):
            self.load_experts(given, prefix)
        left = {name: tensor for name, tensor in state_dict.items() if name.removeprefix(prefix) not in given}
        super()._load_from_state_dict(left, prefix, *arguments)

    def check_experts(self, tensors: Mapping[str, Any], prefix: str, form: ExpertsForm | None = None) -> None:
        """Check names, shapes and dtypes as :meth:`load_experts` does, without changing the layer.

        Args:
            tensors: As in :meth:`load_experts`.
            prefix: As in :meth:`load_experts`.
            form: As in :meth:`load_experts`.

        Raises:
            ConfigError: The tensors do not cover all experts of the layer, or do not fit.
        """
        if not tensors:
            return
        with self._refusing(tensors, prefix):
            self._check_owned()
            for name, tensor in tensors.items():
                check_tensor(name, tensor)
            weights = self._experts_of({name: tensor.to("meta") for name, tensor in tensors.items()}, form)
            if weights.weight_key is not None:
                self._check_keys(weights)
            elif self.selection.weight_key is not None and self.request.online is None:
                recipe_of(self.selection)
            weights.validate(self.config)

    def load_experts(self, tensors: Mapping[str, Any], prefix: str, form: ExpertsForm | None = None) -> None:
        """Replace the experts by entries of a state dict; keep the current ones if there are none.

        Args:
            tensors: Entries below ``prefix``, by the remainders of their names
                (:func:`moe_core.layer.state_dicts.experts_of`).
            prefix: Prefix of their names in the state dict, for error messages.
            form: Layout of stacked tensors.

        Raises:
            ConfigError: The tensors do not cover all experts of the layer, or do not fit. The old experts are
                untouched.
        """
        self.check_experts(tensors, prefix, form)
        if tensors:
            with self._refusing(tensors, prefix):
                self.reload(self._experts_of(tensors, form))

    def _experts_of(self, tensors: Mapping[str, Tensor], form: ExpertsForm | None) -> MoEWeights:
        return experts_of(tensors, self.config, (self.selection.weight_key, self.selection.activation_key), form)

    @contextlib.contextmanager
    def _refusing(self, tensors: Mapping[str, Any], prefix: str) -> Iterator[None]:
        """Name the entries of the state dict in errors."""
        try:
            yield
        except MoEError as error:
            more = f" and {len(tensors) - 1} more" * (len(tensors) > 1)
            raise ConfigError(
                f"load_state_dict() cannot take {prefix}{next(iter(tensors))}{more}, experts that the backend "
                f"{self.selection.backend} runs: {error.message}",
                details=error.details,
            ) from error

    def extra_repr(self) -> str:
        config = self.config
        return (
            f"E={config.num_experts}, top_k={config.top_k}, K={config.hidden_size}, N={config.intermediate_size}, "
            f"backend={self.selection.backend}"
        )


def _own(tensor: Tensor | None) -> Tensor | None:
    """Clone a tensor, so that nothing else references it; a parameter stays a parameter."""
    if not isinstance(tensor, Tensor):
        return tensor
    copied = tensor.detach().clone(memory_format=torch.contiguous_format)
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def _same(tensor: Tensor | None) -> Tensor | None:
    return tensor


def _keys(weight_key: QuantKey | None, activation_key: QuantKey | None) -> str:
    return f"{weight_key or '16-bit weights'} with {activation_key or '16-bit activations'}"


@contextlib.contextmanager
def experts_left_out(model: nn.Module) -> Iterator[None]:
    """Let ``model.state_dict()`` and ``save_pretrained`` omit all experts without a warning.

    Loading what was written then requires the experts from the checkpoint that they came from.

    Args:
        model: Model whose layers are affected while the context is active.
    """
    check_instance("model", model, nn.Module)
    layers = [module for module in model.modules() if isinstance(module, FusedMoELayer)]
    before = [layer.state_dict_without_experts for layer in layers]
    try:
        for layer in layers:
            layer.state_dict_without_experts = True
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer.state_dict_without_experts = value


def _consecutive(kernel: FusedMoEKernel) -> Tensor | None:
    """Expert map of a rank with consecutive experts (the default), or None if not needed."""
    config, movement = kernel.config, kernel.prepare_finalize
    if config.local_experts == config.num_experts or (movement is not None and movement.maps_experts):
        return None
    held = local_expert_range(config.num_experts, config.parallel)
    if len(held) != config.local_experts:
        raise ConfigError(
            f"expert_map is missing: without it and placement= this rank has {len(held)} consecutive experts of "
            f"{config.num_experts}, the config says num_local_experts {config.local_experts}"
        )
    return map_of(held, config.num_experts, kernel.weights.device)


check_before_apply(FusedMoELayer)
check_before_load()
