"""Where each public module is tested: in the test file that mirrors it, in one that imports it, or in a listed one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for path in ROOT.glob("packages/*/src/*") if (path / "__init__.py").exists())
CORE = "packages/moe-core/tests"

#: tests -> modules that they reach through others, which no test imports
COVERED = {
    "tests/test_autocast.py": "moe_core._support.autocast",
    f"{CORE}/layer/test_layer.py": (
        "moe_core._support.fake moe_core.layer.conversion moe_core.layer.replacement "
        "moe_core.layer.router_product moe_core.layer.state_dicts"
    ),
    f"{CORE}/families/test_transformers.py": (
        "moe_core.checkpoint.config.routing_keys moe_core.checkpoint.config.unread moe_core.checkpoint.router"
    ),
    f"{CORE}/interface/test_checkpoint_format.py": "moe_core.checkpoint.experts.checks",
    f"{CORE}/checkpoint/experts/test_layer_experts.py": "moe_core.checkpoint.experts.find_layer",
    f"{CORE}/checkpoint/test_tools.py": (
        "moe_core.checkpoint.experts.quantized moe_core.checkpoint.experts.suffixes moe_core.checkpoint.tools.namings"
    ),
    f"{CORE}/checkpoint/test_reader.py": "moe_core.checkpoint.files.shards",
    "tests/test_sharded_reading.py": "moe_core.checkpoint.experts.sliced",
    "tests/test_linear_weights.py": "moe_core.checkpoint.linear",
    "tests/test_planned.py": "moe_core.checkpoint.planned",
    "tests/test_writers.py": "moe_core.checkpoint.written",
    f"{CORE}/cli/test_commands.py": (
        "moe_core.cli.arguments moe_core.cli.checks moe_core.cli.commands.bench moe_core.cli.parser"
    ),
    f"{CORE}/cli/test_plugin_commands.py": "moe_core.cli.command",
    f"{CORE}/kernels/ops/test_activation.py": "moe_core.kernels.device.activation",
    "tests/test_launch_order.py": "moe_core.kernels.device.pdl",
    f"{CORE}/kernels/gemm/sm90/test_mixed_input.py": (
        "moe_core.kernels.device.gluon moe_core.kernels.gemm.sm90.epilogue "
        "moe_core.kernels.gemm.sm90.fragment_order moe_core.kernels.gemm.sm90.kernel "
        "moe_core.kernels.gemm.sm90.pipeline"
    ),
    f"{CORE}/kernels/gemm/fragments/test_fragment_order.py": (
        "moe_core.kernels.device.prefetch moe_core.kernels.device.registers moe_core.kernels.gemm.fragments.operand"
    ),
    f"{CORE}/kernels/gemm/tiles/test_tile_kernel.py": (
        "moe_core.kernels.device.wait moe_core.kernels.gemm.tiles.operands moe_core.kernels.gemm.tiles.schedule "
        "moe_core.kernels.gemm.tiles.swap_ab"
    ),
    f"{CORE}/kernels/gemm/marlin/test_gemv.py": (
        "moe_core.kernels.gemm.fragments.integer_dot moe_core.kernels.gemm.tiles.finalize"
    ),
    f"{CORE}/kernels/gemm/as_stored/test_tiles.py": (
        "moe_core.kernels.gemm.as_stored.scheme moe_core.kernels.gemm.fused.groups"
    ),
    "packages/moe-fp8/tests/kernels/test_scaled_mm.py": (
        "moe_core.kernels.gemm.fused.plain moe_core.kernels.gemm.fused.scaled_mm"
    ),
    "packages/moe-fp8/tests/kernels/test_scaled_gemv.py": (
        "moe_core.kernels.experts.scaled_gemv moe_core.kernels.gemm.gemv.scaled "
        "moe_core.kernels.gemm.gemv.scaled_kernel"
    ),
    "packages/moe-fp8/tests/kernels/test_marlin_layers.py": "moe_core.kernels.experts.marlin",
    f"{CORE}/kernels/gemm/heuristics/test_heuristics.py": (
        "moe_core.kernels.gemm.heuristics.invariant moe_core.kernels.gemm.heuristics.regimes"
    ),
    f"{CORE}/kernels/launch/test_replay.py": "moe_core.kernels.launch.recorded moe_core.spec.tensor_record",
    "packages/moe-fp8/tests/experts/test_flashinfer_doubles.py": (
        "moe_core.kernels.libraries.flashinfer_cutlass moe_core.kernels.libraries.trtllm_activation"
    ),
    "packages/moe-fp8/tests/experts/test_flashinfer_trtllm.py": (
        "moe_core.kernels.libraries.trtllm_experts moe_core.kernels.libraries.trtllm_routing"
    ),
    "packages/moe-mxfp4/tests/experts/test_flashinfer_trtllm.py": (
        "moe_core.kernels.libraries.mxfp8_input moe_mxfp4.padding"
    ),
    f"{CORE}/kernels/tuning/test_profile.py": "moe_core.kernels.tuning.plans",
    "tests/test_replaced_by_16_bits.py": "moe_core.layer.recipe",
    "tests/test_model_setup.py": "moe_core.layer.setup",
    f"{CORE}/parallel/distributed/test_groups.py": "moe_core.parallel.checks",
    "tests/test_ranks.py": "moe_core.parallel.prepare_finalize.fixed_order",
    f"{CORE}/parallel/prepare_finalize/test_by_name.py": "moe_core.parallel.prepare_finalize.ranks_sum",
    "tests/test_scheme_functions.py": "moe_core.plugins.scheme moe_core.selection.functions",
    f"{CORE}/kernels/ops/test_sort.py": "moe_core.reference.skewed_routing",
    "tests/test_converted.py": "moe_core.selection.converted",
    "tests/test_kernel_choice.py": "moe_core.selection.kernel_choice",
    f"{CORE}/testing/test_plugin.py": "moe_core.testing.pytest_options",
    "packages/moe-int8/tests/kernels/test_scaled_mm.py": "moe_int8.experts.scaled_mm",
    "packages/moe-int8/tests/formats/test_compressed_tensors.py": (
        "moe_int8.formats.int8_layout moe_int8.formats.packed moe_int8.formats.static_inputs"
    ),
    "packages/moe-int8/tests/test_command_line.py": "moe_int8.quickstart",
    "packages/moe-mxfp4/tests/test_tool_outputs.py": "moe_mxfp4.formats.mxfp4_layout",
    "packages/moe-mxfp4/tests/experts/test_triton.py": "moe_mxfp4.kernels.scaled moe_mxfp4.layout",
    "packages/moe-transformers/tests/test_filled.py": "moe_transformers.activation",
    "packages/moe-transformers/tests/commands/test_perplexity.py": (
        "moe_transformers.command_line moe_transformers.commands.tokens"
    ),
    "packages/moe-transformers/tests/commands/test_generate.py": (
        "moe_transformers.commands.memory moe_transformers.commands.model"
    ),
    "packages/moe-transformers/tests/test_sixteen_bit.py": "moe_transformers.missing",
    "packages/moe-transformers/tests/test_loading.py": (
        "moe_transformers.model_loading moe_transformers.options moe_transformers.refusals moe_transformers.settings"
    ),
    "packages/moe-transformers/tests/test_quantize.py": "moe_transformers.saving",
    "packages/moe-vllm/tests/test_plugin.py": "moe_vllm.keys moe_vllm.layer",
    "packages/moe-wna16/tests/test_tool_outputs.py": (
        "moe_wna16.formats.awq_packing moe_wna16.formats.columns moe_wna16.formats.wna16_layout"
    ),
    "packages/moe-wna16/tests/experts/test_flashinfer_trtllm.py": "moe_wna16.libraries.signed",
}


def named(path: Path) -> Iterator[str]:
    """Everything that a test imports, and modules that it names in a string."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("moe_"):
            yield node.value.partition(":")[0]


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """What the tests of all packages import, directly or through their support modules."""
    files = (*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("tests/**/*.py"))
    return {name for path in files if path != Path(__file__) for name in named(path)}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_every_public_module_has_a_test(source: Path, imported: set[str]) -> None:
    listed = {module for modules in COVERED.values() for module in modules.split()}
    untested, needless = [], []
    for path in sorted(source.rglob("[!_]*.py")):
        place = path.relative_to(source)
        module = ".".join((source.name, *place.with_suffix("").parts))
        mirror = source.parents[1] / "tests" / place.parent / f"test_{place.name}"
        found = mirror.exists() or module in imported
        if not found and module not in listed:
            untested.append(module)
        if found and module in listed:
            needless.append(module)
    assert not untested, "write a test that mirrors the module, or list what covers it"
    assert not needless, "remove these from COVERED: a test of theirs is found"


def test_listed_tests_and_modules_are_there() -> None:
    assert [path for path in COVERED if not (ROOT / path).is_file()] == []
    modules = [module for several in COVERED.values() for module in several.split()]
    assert len(modules) == len(set(modules))
    folders = {source.name: source for source in SOURCES}
    gone = []
    for module in modules:
        package, *parts = module.split(".")
        if not folders[package].joinpath(*parts).with_suffix(".py").is_file():
            gone.append(module)
    assert gone == []
