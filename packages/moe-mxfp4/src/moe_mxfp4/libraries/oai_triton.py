"""Locating and importing OpenAI's `triton_kernels`.

vLLM's wheel vendors a copy whose modules import each other as `triton_kernels`. It is loaded under that name, without
importing vLLM.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

from moe_core import ConfigError

from moe_mxfp4.libraries import TRITON_KERNELS

NAME = "triton_kernels"
#: module that distinguishes the package from another of the same name
KNOWN_BY = "routing.py"


def load_triton_kernels() -> SimpleNamespace:
    """Import the package on first use and return its functions.

    Returns:
        The functions and classes as attributes.

    Raises:
        ConfigError: the package is not installed, or another package of this name was imported.
    """
    if not _holds(NAME):
        _load_copy()

    def module(name: str) -> SimpleNamespace:
        return SimpleNamespace(**vars(importlib.import_module(f"{NAME}.{name}")))

    matmul, routing, tensor = module("matmul_ogs"), module("routing"), module("tensor")
    layout = module("tensor_details.layout")
    return SimpleNamespace(
        FP4=tensor.FP4,
        FnSpecs=matmul.FnSpecs,
        FusedActivation=matmul.FusedActivation,
        GatherIndx=routing.GatherIndx,
        HopperMXScaleLayout=layout.HopperMXScaleLayout,
        HopperMXValueLayout=layout.HopperMXValueLayout,
        PrecisionConfig=matmul.PrecisionConfig,
        RoutingData=routing.RoutingData,
        Storage=tensor.Storage,
        Tensor=tensor.Tensor,
        compute_expt_data=routing.compute_expt_data,
        matmul_ogs=matmul.matmul_ogs,
        swiglu_fn=module("swiglu").swiglu_fn,
    )


def _load_copy() -> None:
    """Import vLLM's copy as `triton_kernels`."""
    folder = _copy()
    if folder is None:
        raise ConfigError(f"{TRITON_KERNELS.distribution} is not installed ({TRITON_KERNELS.hint})")
    other = sys.modules.get(NAME)
    if other is not None:
        raise ConfigError(f"{other.__file__ or NAME} has been imported as {NAME}; OpenAI's is in {folder}")
    spec = importlib.util.spec_from_file_location(
        NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ConfigError(f"{folder} cannot be imported")
    package = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = package
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules[NAME]
        raise


def _copy() -> Path | None:
    """Return the folder of vLLM's copy."""
    for copy in TRITON_KERNELS.copies:
        top, *rest = copy.split(".")[:-1]
        spec = importlib.util.find_spec(top)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            folder = Path(place).joinpath(*rest)
            if (folder / KNOWN_BY).is_file():
                return folder
    return None


def _holds(name: str) -> bool:
    """Return whether ``name`` is a package with the module that identifies OpenAI's."""
    spec = importlib.util.find_spec(name)
    places = (spec.submodule_search_locations or ()) if spec is not None else ()
    return any((Path(place) / KNOWN_BY).is_file() for place in places)
