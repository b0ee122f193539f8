"""The engine-facing functions of a scheme, as far as all schemes share them.

A scheme package creates them from its spec, and itself names the tensors that its weights have::

    _FUNCTIONS = SchemeFunctions(SCHEME)
    select_fp8_moe_backend = _FUNCTIONS.select("fp8", __name__)
    map_fp8_backend = _FUNCTIONS.map_backend
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from moe_core.errors import ConfigError, did_you_mean
from moe_core.selection.registry import registry
from moe_core.selection.report import BackendRefusedError
from moe_core.spec.quant_key import QuantKey, as_quant_key

if TYPE_CHECKING:
    import torch

    from moe_core.interface.experts import FusedMoEExperts
    from moe_core.interface.prepare_finalize import FusedMoEPrepareAndFinalizeModular
    from moe_core.parallel.distributed import ParallelGroups
    from moe_core.parallel.placement.placement import ExpertPlacement
    from moe_core.plugins.backend import Backend
    from moe_core.plugins.scheme import SchemeSpec
    from moe_core.runtime.kernel import FusedMoEKernel
    from moe_core.selection.oracle import Oracle
    from moe_core.selection.report import Selection
    from moe_core.spec.config import FusedMoEConfig
    from moe_core.spec.device import DeviceInfo
    from moe_core.spec.environment import Environment
    from moe_core.spec.weights import KernelWeights
    from moe_core.spec.workspace import Workspace

_SELECT = """The backend for ``config``: ``.backend``, ``.experts`` (its class), ``.report`` (each candidate's reasons).

    {doc}A named backend is used or refused, never replaced.  Raises SelectionError, ConfigError.
    """


class SelectBackend(Protocol):
    """Function that selects a backend for one kind of weights, whose keys are its defaults."""

    __name__: str

    def __call__(
        self,
        config: FusedMoEConfig,
        *,
        weight_key: QuantKey | str = ...,
        activation_key: QuantKey | str | None = ...,
        moe_backend: str = "auto",
        device: DeviceInfo | str | torch.device | None = None,
        environment: Environment | None = None,
    ) -> Selection: ...


class SchemeFunctions:
    """Selection, conversion and construction by the oracle of an installed scheme.

    The oracle is looked up on first use.

    Args:
        spec: Spec of the scheme.
    """

    def __init__(self, spec: SchemeSpec) -> None:
        self.spec = spec

    @property
    def oracle(self) -> Oracle:
        """The oracle of the installed scheme."""
        return registry().oracle(self.spec.name)

    def select(self, kind: str, module: str) -> SelectBackend:
        """Create ``select_<kind>_moe_backend``: :meth:`moe_core.Oracle.select` with default keys.

        Args:
            kind: Name of a kind of weights in the spec.
            module: Name of the module that the function belongs to.

        Returns:
            The function.
        """
        asked = next(known for known in self.spec.kinds if known.name == kind)

        def select(
            config: FusedMoEConfig,
            *,
            weight_key: QuantKey | str = asked.weight_key,
            activation_key: QuantKey | str | None = asked.activation_key,
            moe_backend: str = "auto",
            device: DeviceInfo | str | torch.device | None = None,
            environment: Environment | None = None,
        ) -> Selection:
            if asked.reason_against is not None:
                reason = asked.reason_against(as_quant_key(weight_key, "weight_key"))
                if reason is not None:
                    raise ConfigError(reason)

            def ask(activation: QuantKey | str | None) -> Selection:
                return self.oracle.select(
                    config,
                    weight_key=weight_key,
                    activation_key=activation,
                    moe_backend=moe_backend,
                    device=device,
                    environment=environment,
                )

            if activation_key != "auto" or not asked.activations:
                return ask(activation_key)
            return _first_that_fits(ask, asked.activations)

        select.__name__ = select.__qualname__ = asked.functions[0]
        select.__module__ = module
        select.__doc__ = _SELECT.format(doc=f"{asked.doc}\n    " if asked.doc else "")
        return select

    def convert(self, selection: Selection, **tensors: torch.Tensor | None) -> KernelWeights:
        """Convert canonical tensors to the layout of the selected backend.

        Args:
            selection: Selection of the layer.
            tensors: Tensors by the field names of :class:`moe_core.MoEWeights`.

        Returns:
            Weights in the backend's layout.
        """
        return self.oracle.convert(selection, None, **tensors)

    def make_kernel(
        self,
        selection: Selection,
        weights: KernelWeights,
        *,
        prepare_finalize: FusedMoEPrepareAndFinalizeModular | None = None,
        groups: ParallelGroups | None = None,
        placement: ExpertPlacement | None = None,
        workspace: Workspace | None = None,
        layer: str = "",
    ) -> FusedMoEKernel:
        """Build a kernel: prepare, the selected experts and finalize around converted weights.

        Args:
            selection: Selection of the layer.
            weights: Converted weights.
            prepare_finalize: Class that moves tokens. Default: within this rank, or the choice of the config for
                ``groups`` and ``placement``.
            groups: Process groups of the layer's ranks.
            placement: Placement of experts on these ranks.
            workspace: Workspace; may be shared with layers that run earlier.
            layer: Name of the layer, which must be equal on all ranks of ``groups``.

        Returns:
            The kernel.
        """
        return self.oracle.make_kernel(
            selection,
            weights,
            prepare_finalize=prepare_finalize,
            groups=groups,
            placement=placement,
            workspace=workspace,
            layer=layer,
        )

    def backend_to_kernel_cls(self, backend: str) -> list[type[FusedMoEExperts]]:
        """Return the experts classes of a backend, in the order in which selection considers them.

        Args:
            backend: Name of the backend.

        Returns:
            The classes.

        Raises:
            ConfigError: The name is unknown.
        """
        return list(self._backend(backend).load())

    def map_backend(self, runner_backend: str) -> str:
        """Map an engine's backend option to a backend of this scheme.

        Args:
            runner_backend: Name or alias of a backend.

        Returns:
            A member of the scheme's enum, or the name of a backend from another package.

        Raises:
            ConfigError: The name is unknown; the message lists the valid ones. It is a ValueError.
        """
        name = self._backend(runner_backend).name
        members = () if self.spec.backend_enum is None else tuple(self.spec.backend_enum)
        return next((member for member in members if member.value == name), name)

    def get_priority_backends(
        self,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None = None,
        *,
        device: DeviceInfo | str | torch.device | None = None,
    ) -> list[str]:
        """Return all backends in order of preference for a request, whether they fit or not.

        Args:
            config: Config of the layer.
            weight_key: Quantization of weights.
            activation_key: Quantization of activations; None for 16 bits.
            device: Device to order for.

        Returns:
            Names of the backends.
        """
        rows = self.oracle.priority(config, weight_key=weight_key, activation_key=activation_key, device=device)
        return [self.map_backend(row.name) for row in rows]

    def _backend(self, name: str) -> Backend:
        rows = self.oracle.table()
        table = {row.name: row for row in rows}
        table = {alias: row for row in rows for alias in row.aliases} | table
        found = table.get(str(getattr(name, "value", name)))
        if found is None:
            meant = did_you_mean(name, table)
            raise ConfigError(f"{self.spec.name} has no backend {name!r}{meant}; installed: {', '.join(table)}")
        return found


def _first_that_fits(ask: Callable[[QuantKey | str | None], Selection], activations: tuple[QuantKey, ...]) -> Selection:
    """Select with 16-bit activations, or with the first key for which the named backend fits."""
    try:
        return ask(None)
    except BackendRefusedError:
        for key in activations:
            try:
                return ask(key)
            except BackendRefusedError:
                continue
        raise
