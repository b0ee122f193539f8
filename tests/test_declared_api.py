"""Packages on core use its declared modules, and of those the declared names: everything else may change."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import moe_core
import pytest

ROOT = Path(__file__).parents[1]
#: scheme packages and examples of other people's
SOURCES = sorted(
    path
    for pattern in ("packages/*/src/*", "examples/*/src/*")
    for path in ROOT.glob(pattern)
    if path.is_dir() and not path.name.startswith("moe_core")
)
#: what they may import of core
DECLARED = ("moe_core", "moe_core.format_api")
#: folders and modules of scheme packages whose part of core, the kernels, is not declared yet
UNDECLARED = ("experts", "kernels", "libraries", "scales.py")


def offences(code: str, declared: Sequence[str] = DECLARED) -> Iterator[tuple[int, str]]:
    """(line, what) of everything that ``code`` uses of core beside the declared names, also inside functions."""
    public = {name: frozenset(importlib.import_module(name).__all__) for name in declared}
    tree = ast.parse(code)
    #: local name -> the module of core that it stands for
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "moe_core":
                    if alias.name not in public:
                        yield node.lineno, alias.name
                    modules[alias.asname or "moe_core"] = alias.name if alias.asname else "moe_core"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "moe_core":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in public:
                    modules[alias.asname or alias.name] = whole
                elif alias.name not in public.get(node.module or "", ()):
                    yield node.lineno, whole
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # a module that is named for a later import
            module = node.value.partition(":")[0]
            if module.startswith("moe_core.") and module.replace(".", "").isidentifier() and module not in public:
                yield node.lineno, module
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            module = modules[node.value.id]
            if node.attr not in public.get(module, ()) and f"{module}.{node.attr}" not in public:
                yield node.lineno, f"{module}.{node.attr}"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_packages_use_declared_names_alone(source: Path) -> None:
    files = [path for path in sorted(source.rglob("*.py")) if path.relative_to(source).parts[0] not in UNDECLARED]
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{line} uses {what}"
        for path in files
        for line, what in offences(path.read_text(encoding="utf-8"))
    ]
    assert not found


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("from moe_core.checkpoint import Checkpoint", "moe_core.checkpoint.Checkpoint"),
        ("from moe_core.checkpoint.format import CheckpointFormat", "moe_core.checkpoint.format.CheckpointFormat"),
        ("from moe_core import ops", "moe_core.ops"),
        ("from moe_core.format_api import INTERNAL", "moe_core.format_api.INTERNAL"),
        ("import moe_core.ops.sort", "moe_core.ops.sort"),
        ("import moe_core as mc\nmc.ops.sort", "moe_core.ops"),
        ("def f():\n    from moe_core.plugins import guard", "moe_core.plugins.guard"),
        ("import importlib\nimportlib.import_module('moe_core.gemm')", "moe_core.gemm"),
        ("CLASSES = ('moe_core.torch_experts:TorchExperts',)", "moe_core.torch_experts"),
    ],
)
def test_other_uses_are_found(code: str, what: str) -> None:
    assert [found for _, found in offences(code)] == [what]


@pytest.mark.parametrize(
    "code",
    [
        "from moe_core import QuantKey, format_api\nformat_api.LayerExperts",
        "import moe_core as mc\nmc.QuantKey",
        "import moe_core.format_api\nmoe_core.format_api.LayerExperts",
        "import torch, moe_fp8\nfrom moe_fp8.formats import fp8_block",
        "text = 'moe_core.format_api reads; moe_core. does not end so'",
    ],
)
def test_declared_uses_are_none(code: str) -> None:
    assert not list(offences(code))


#: names that packages of protocol 2 may count on
PROTOCOL_2 = (
    "BadValuesError CheckpointFormat ExpertLayout ExpertMatrices ExpertStorage GptqSettings INPUT_SCALES LayerExperts "
    "QuantArgs QuantEntries QuantGroup QuantizedFormat QuantizedLayout QuarkArgs QuarkLayer Values ZERO_POINTS "
    "auto_round_settings check_expert_tensor check_stated_shape gate_rows_first gptq_settings is_interleaved "
    "is_transposed load_checked load_stacked missing module_name one_suffix quant_algo quant_group quantizers "
    "quark_layer refuse_lost_weights refuse_mixed refuse_zero_points short stored_matrix unknown_algo"
)


def test_names_go_with_a_new_protocol_alone() -> None:
    """Where one must go, raise PROTOCOL_VERSION, and list the names of the new protocol."""
    assert moe_core.PROTOCOL_VERSION == 2
    assert not set(PROTOCOL_2.split()) - set(importlib.import_module("moe_core.format_api").__all__)
