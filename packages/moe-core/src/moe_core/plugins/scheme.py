"""Declaration of a quantization scheme, which its package registers with core."""

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

#: (own backends in default order, device, layer, weight key, activation key) -> candidates, in order of preference.
Order = Callable[
    ["tuple[Backend, ...]", "DeviceInfo", "FusedMoEConfig", "QuantKey | None", "QuantKey | None"],
    "tuple[Backend, ...]",
]
#: (layer, weight key, activation key) -> why the request is invalid for this scheme, None if it is valid.
Refusal = Callable[["FusedMoEConfig", "QuantKey | None", "QuantKey | None"], "str | None"]


@dataclass(frozen=True)
class WeightKind:
    """One kind of weights of a scheme, under the name that engines use.

    Functions such as ``select_<name>_moe_backend`` refer to it.

    Attributes:
        name: Name of the kind in function names.
        weight_key: Default weight key.
        activation_key: Default activation key. None: 16 bits. "auto": 16 bits, or the first of ``activations`` that
            works with the backend the caller names.
        activations: Candidates for "auto".
        reason_against: Maps a weight key that is not of this kind to the text of the ConfigError.
        converted_as: Kind whose functions also convert and construct this one; empty: this kind.
        doc: Additions to the common description of the function.
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
        """Names of the functions that select, convert, construct and make quant configs."""
        shared = self.converted_as or self.name
        return (
            f"select_{self.name}_moe_backend",
            f"convert_to_{shared}_moe_kernel_format",
            f"make_{shared}_moe_kernel",
            f"make_{shared}_moe_quant_config",
        )


@dataclass(frozen=True)
class SchemeSpec:
    """Specification of a scheme, registered as entry point ``NAME = "module:SCHEME"``.

    The group of the entry point is ``moe_core.schemes``.

    Attributes:
        name: Name of the scheme.
        interface_api: Version of the interface that the scheme was written for, as a literal (see
            :mod:`moe_core.interface.versions`).
        format_api: Same for checkpoint formats, if the scheme has any.
        kernel_api: Same for kernels, if its backends use base classes or device functions of core.
        backends: Backends in default order.
        order: Reorders the backends for some requests.
        reason_against: Rejects requests that are invalid with every backend.
        package: Distribution that provides the scheme ("moe-fp8"), for reports.
        backend_enum: Backend names that the code of engines uses.
        weight_only: Activations have 16 bits unless the caller specifies their quantization.
        last_resort: Backend that supports every request. Backends of other packages precede it by default.
        formats: Checkpoint formats as classes or "module:Class", most specific first.
        quant_methods: The ``quant_method`` values that the formats read.
        quickstart: Function, or "module:function", that writes a small checkpoint into a folder.
        online: Quantizations of 16-bit experts at load time.
        kinds: Kinds of weights under the names that engines use, the most common one first.
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
        """Write a small checkpoint of this scheme.

        Args:
            folder: Existing folder to write into.

        Raises:
            ConfigError: The scheme has no quickstart.
        """
        check_instance("folder", folder, Path)
        if self.quickstart is None:
            raise ConfigError(f"the scheme {self.name} writes no checkpoint: its quickstart is None")
        writer: Any = imported(self.quickstart) if isinstance(self.quickstart, str) else self.quickstart
        writer(folder)
