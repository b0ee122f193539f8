"""Engines set torch's default dtype and device while they build a model; layers follow neither."""

from __future__ import annotations

import ast
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from moe_core.selection.registry import registry
from moe_core_layers import all_kinds
from moe_core_torch_defaults import differing

PACKAGES = Path(__file__).parents[1] / "packages"
#: functions of torch that make a tensor where the default device is, and those whose dtype follows the default
FACTORIES = {
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
}
OF_DEFAULT_DTYPE = FACTORIES - {"arange", "randint", "randperm"}
#: commands, which are processes of their own, and device code
OTHERS = ("cli", "commands", "kernels", "quickstart.py", "testing")


def factories() -> Iterator[tuple[str, str, ast.Call]]:
    """(place, name, call) of each in the packages."""
    for path in sorted(PACKAGES.glob("*/src/**/*.py")):
        if any(part in OTHERS for part in path.parts) or path.name.endswith("_kernels.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in FACTORIES:
                    yield f"{path.relative_to(PACKAGES)}:{node.lineno}", name, node


def test_tensors_are_made_with_their_device_and_dtype() -> None:
    found = list(factories())
    assert len(found) > 50
    missing = []
    for place, name, node in found:
        given = {keyword.arg for keyword in node.keywords}
        needed = {"device", "dtype"} if name in OF_DEFAULT_DTYPE else {"device"}
        if None not in given and not needed <= given:
            missing.append(f"{place}: {ast.unparse(node)} has no {' and no '.join(sorted(needed - given))}")
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(("dtype", "device"), [(torch.float64, "cpu"), (torch.float16, "meta")])
def test_layers_are_loaded_and_called_with_other_defaults(dtype: torch.dtype, device: str, tmp_path: Path) -> None:
    layers = []
    for kind in all_kinds():
        config = kind.config(dtype=torch.bfloat16)
        layers.append((kind, config, kind.weights(config)))
    folders = []
    for scheme in ("fp8", "int8", "mxfp4", "wna16"):
        folders.append(tmp_path / scheme)
        folders[-1].mkdir()
        registry().scheme(scheme).write_quickstart(folders[-1])
    generator = torch.Generator().manual_seed(3)
    x, scores = torch.randn(17, 256, generator=generator).bfloat16(), torch.rand(17, 6, generator=generator)
    # tables that are made once are made there
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        wrong = pool.apply(differing, (dtype, device, layers, folders, x, scores))
    assert not wrong, "\n".join(wrong)
