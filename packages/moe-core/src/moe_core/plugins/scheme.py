"""A scheme as data: what its package declares once, and registers with core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_core.errors import ConfigError, check_instance
from moe_core.plugins.entry_points import imported

if TYPE_CHECKING:
    from moe_core.interface.checkpoint_format import CheckpointFormat
    from moe_core.kernels.ops.online import OnlineQuantization
    from moe_core.plugins.backend import Backend
    from moe_core.spec.config import FusedMoEConfig
    from moe_core.spec.device import DeviceInfo
    from moe_core.spec.quant_key import QuantKey

#: (own backends in default order, device, layer, weight key, activation key) -> those that are asked, in order
Order = Callable[
    ["tuple[Backend, ...]", "DeviceInfo", "FusedMoEConfig", "QuantKey | None", "QuantKey | None"],
    "tuple[Backend, ...]",
]
#: (layer, weight key, activation key) -> why the scheme cannot mean such a request at all, None if it can
Refusal = Callable[["FusedMoEConfig", "QuantKey | None", "QuantKey | None"], "str | None"]


@dataclass(frozen=True)
class WeightKind:
    """One kind of weights that engines know a scheme by: ``select_<name>_moe_backend`` and its relatives ask for it.

    - ``weight_key``, ``activation_key``: what is asked for where nothing is said; activation None: 16 bits, "auto":
      16 bits, or what a backend that is named needs, the first of ``activations`` with which it fits
    - ``reason_against``: a weight key that is not of this kind -> the text of the ConfigError
    - ``converted_as``: the kind whose functions convert and construct this one too, itself where nothing is said
    - ``doc``: what else there is to say of the function, after its common description
    """

    name: str
    weight_key: QuantKey
    activation_key: QuantKey | str | None
    activations: tuple[QuantKey, ...] = ()
    reason_against: Callable[[QuantKey | None], str | None] | None = None
    converted_as: str = ""
    doc: str = ""

    @property
    def functions(self) -> tuple[str, str, str, str]:
        """Names of the functions by which engines select, convert, construct, and make quant configs."""
        shared = self.converted_as or self.name
        return (
            f"select_{self.name}_moe_backend",
            f"convert_to_{shared}_moe_kernel_format",
            f"make_{shared}_moe_kernel",
            f"make_{shared}_moe_quant_config",
        )


@dataclass(frozen=True)
class SchemeSpec:
    """What a scheme is; the entry point ``NAME = "module:SCHEME"`` in ``moe_core.schemes`` names one.

    - ``name``
    - ``interface_api``, ``format_api``, ``kernel_api``: versions of the declared API that it was written for, as
      literals (see :mod:`moe_core.interface.versions`); ``format_api`` where it has formats, ``kernel_api`` where its
      backends use base classes or device functions of core
    - ``backends`` in default order; ``order``: another order for some requests; ``package``: the distribution that
      brings them ("moe-fp8"), for reports; ``backend_enum``: names of theirs that engines' code uses
    - ``reason_against``: why a request has no meaning, whatever backends there are
    - ``weight_only``: activations are in 16 bits where nobody says what they are quantised as
    - ``last_resort``: the backend that always fits; those of other packages that say nothing come before it
    - ``formats``: checkpoint formats, classes or "module:Class", most specific first; ``quant_methods``: what they read
    - ``quickstart``: writes a small checkpoint into a folder; a function or "module:function"
    - ``online``: what it makes of 16-bit experts at load
    - ``kinds``: of weights that engines know it by, the usual one first
    """

    name: str
    interface_api: tuple[int, int]
    format_api: tuple[int, int] | None = None
    kernel_api: tuple[int, int] | None = None
    backends: tuple[Backend, ...] = ()
    order: Order | None = None
    reason_against: Refusal | None = None
    package: str = ""
    backend_enum: type[StrEnum] | None = None
    weight_only: bool = False
    last_resort: str = "torch"
    formats: tuple[type[CheckpointFormat] | str, ...] = ()
    quant_methods: tuple[str, ...] = ()
    quickstart: Callable[[Path], None] | str | None = field(default=None, compare=False)
    online: tuple[OnlineQuantization, ...] = ()
    kinds: tuple[WeightKind, ...] = ()

    def write_quickstart(self, folder: Path) -> None:
        """Write a small checkpoint that the scheme reads into ``folder``; ConfigError where it has none."""
        check_instance("folder", folder, Path)
        if self.quickstart is None:
            raise ConfigError(f"the scheme {self.name} writes no checkpoint: its quickstart is None")
        writer: Any = imported(self.quickstart) if isinstance(self.quickstart, str) else self.quickstart
        writer(folder)
