"""The functions that engines know a scheme by, as far as all schemes share them.

A scheme package gives them its names, its defaults and the tensors that its weights have::

    FUNCTIONS = SchemeFunctions("fp8", Fp8MoeBackend)
    map_fp8_backend = FUNCTIONS.map_backend
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from moe_core.errors import ConfigError, did_you_mean
from moe_core.registry import registry

if TYPE_CHECKING:
    import torch

    from moe_core.backend import Backend
    from moe_core.config import FusedMoEConfig
    from moe_core.device import DeviceInfo
    from moe_core.environment import Environment
    from moe_core.experts import FusedMoEExperts
    from moe_core.kernel import FusedMoEKernel
    from moe_core.oracle import Oracle
    from moe_core.prepare_finalize import FusedMoEPrepareAndFinalizeModular
    from moe_core.quant_key import QuantKey
    from moe_core.selection import Selection
    from moe_core.weights import KernelWeights
    from moe_core.workspace import Workspace


class SchemeFunctions:
    """Selection, conversion and construction by the oracle of the installed ``scheme``, looked up when it is needed.

    ``backends``: the scheme's names of its own backends; those of other packages are plain texts.
    """

    def __init__(self, scheme: str, backends: type[StrEnum]) -> None:
        self.scheme = scheme
        self.backends = backends

    @property
    def oracle(self) -> Oracle:
        return registry().oracle(self.scheme)

    def select(
        self,
        config: FusedMoEConfig,
        *,
        weight_key: QuantKey | str | None,
        activation_key: QuantKey | str | None,
        moe_backend: str,
        device: DeviceInfo | str | torch.device | None,
        environment: Environment | None,
    ) -> Selection:
        """See :meth:`moe_core.Oracle.select`."""
        return self.oracle.select(
            config,
            weight_key=weight_key,
            activation_key=activation_key,
            moe_backend=moe_backend,
            device=device,
            environment=environment,
        )

    def convert(self, selection: Selection, **tensors: torch.Tensor | None) -> KernelWeights:
        """Canonical tensors by the names of :class:`moe_core.MoEWeights`, in the layout of the selected backend."""
        return self.oracle.convert(selection, None, **tensors)

    def make_kernel(
        self,
        selection: Selection,
        weights: KernelWeights,
        *,
        prepare_finalize: FusedMoEPrepareAndFinalizeModular | None = None,
        workspace: Workspace | None = None,
    ) -> FusedMoEKernel:
        """prepare + the selected experts + finalize around converted weights.

        ``prepare_finalize``: what moves tokens, default within this rank; ``workspace``: may be shared with layers that
        run before.
        """
        return self.oracle.make_kernel(selection, weights, prepare_finalize=prepare_finalize, workspace=workspace)

    def backend_to_kernel_cls(self, backend: str) -> list[type[FusedMoEExperts]]:
        """The experts classes of a backend, in the order in which they are asked; ConfigError for other names."""
        return list(self._backend(backend).load())

    def map_backend(self, runner_backend: str) -> str:
        """What an engine's option names: a member of the scheme's enum, or the name of another package's backend.

        Raises ConfigError, which is a ValueError, with the names that there are.
        """
        name = self._backend(runner_backend).name
        return next((member for member in self.backends if member.value == name), name)

    def get_priority_backends(
        self,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None = None,
        *,
        device: DeviceInfo | str | torch.device | None = None,
    ) -> list[str]:
        """Every backend in order of preference for a request, whether it fits or not."""
        rows = self.oracle.priority(config, weight_key=weight_key, activation_key=activation_key, device=device)
        return [self.map_backend(row.name) for row in rows]

    def _backend(self, name: str) -> Backend:
        rows = self.oracle.table()
        table = {row.name: row for row in rows}
        table = {alias: row for row in rows for alias in row.aliases} | table
        found = table.get(str(getattr(name, "value", name)))
        if found is None:
            meant = did_you_mean(name, table)
            raise ConfigError(f"{self.scheme} has no backend {name!r}{meant}; installed: {', '.join(table)}")
        return found
