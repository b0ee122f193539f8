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
CORE = ("moe_core",)
#: what they may import of core
DECLARED = (
    "moe_core",
    "moe_core.api.commands",
    "moe_core.api.engines",
    "moe_core.api.experts",
    "moe_core.api.formats",
    "moe_core.api.sm90",
    "moe_core.api.kernels",
    "moe_core.api.libraries",
    "moe_core.api.models",
    "moe_core.api.command_line",
)


def offences(code: str, declared: Sequence[str] = DECLARED) -> Iterator[tuple[int, str]]:
    """(line, what) of everything that ``code`` uses of core beside the declared names, also inside functions."""
    public = {name: frozenset(importlib.import_module(name).__all__) for name in declared}
    tree = ast.parse(code)
    #: local name -> the module of core that it stands for
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in CORE:
                    if alias.name not in public:
                        yield node.lineno, alias.name
                    modules[alias.asname or "moe_core"] = alias.name if alias.asname else "moe_core"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in CORE:
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
    files = sorted(source.rglob("*.py"))
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
        (
            "from moe_core.interface.checkpoint_format import CheckpointFormat",
            "moe_core.interface.checkpoint_format.CheckpointFormat",
        ),
        ("from moe_core.kernels import ops", "moe_core.kernels.ops"),
        ("from moe_core.api.formats import INTERNAL", "moe_core.api.formats.INTERNAL"),
        ("import moe_core.kernels.ops.sort", "moe_core.kernels.ops.sort"),
        ("import moe_core as mc\nmc.kernels.sort", "moe_core.kernels"),
        ("def f():\n    from moe_core.plugins.faults import attempt", "moe_core.plugins.faults.attempt"),
        ("import importlib\nimportlib.import_module('moe_core.kernels.gemm')", "moe_core.kernels.gemm"),
        ("CLASSES = ('moe_core.reference.torch_experts:TorchExperts',)", "moe_core.reference.torch_experts"),
    ],
)
def test_other_uses_are_found(code: str, what: str) -> None:
    assert [found for _, found in offences(code)] == [what]


@pytest.mark.parametrize(
    "code",
    [
        "from moe_core import QuantKey\nfrom moe_core.api import formats\nformats.LayerExperts",
        "import moe_core as mc\nmc.QuantKey",
        "import moe_core.api.formats as formats\nformats.LayerExperts",
        "import torch, moe_fp8\nfrom moe_fp8.formats import fp8_block",
        "text = 'moe_core.api.formats reads; moe_core. does not end so'",
    ],
)
def test_declared_uses_are_none(code: str) -> None:
    assert not list(offences(code))


#: names that packages written for the versions of 1.0 may count on, in addition to those of `moe_core`
NAMES = {
    "moe_core.api.commands": ("activation_key_of bytes_text device_of dtype_of duration emit progress seconds_since"),
    "moe_core.api.command_line": (
        "Command add_activation_key add_backend add_checkpoint add_device add_dtype add_quantize add_seed "
        "check_file check_folder check_least whole"
    ),
    "moe_core.api.engines": "Engine EngineChanged VersionRange log_once require select_kernel unpack_row_pairs",
    "moe_core.api.experts": (
        "Adapters GroupedExperts LayerProblem MarlinExperts MarlinIntegerExperts ScaledMMExperts "
        "TileConfig TilePlan as_words expert_slices integer_row_scales interleave of_expert order_words "
        "quantize_tensor relative_e8m0"
    ),
    "moe_core.api.formats": (
        "AutoRoundSettings BadValuesError CheckpointFormat ExpertLayout ExpertStack ExpertStorage FLOATS GptqSettings "
        "INPUT_SCALES LayerExperts Matrix QuantArgs QuantEntries QuantGroup QuantizedFormat QuantizedLayout QuarkArgs "
        "QuarkLayer Query Shape TensorRule Values as_float32 auto_round_settings gate_rows_first gptq_settings "
        "is_auto_rounds is_interleaved is_transposed load_checked load_stacked module_name one_suffix per_matrix "
        "quant_algo quant_group quantizers quark_layer scalar short stored_matrix unknown_algo write_folder"
    ),
    "moe_core.api.sm90": "HALF LAYOUT TILE free_slot wait_for_slot",
    "moe_core.api.kernels": (
        "ActivationScheme Converted E4M3 FEW GemmWeight GemvFunctions GroupScheme INTERPRET LOAD_PARTS LOAD_WORDS "
        "MarlinMatrix SHORT_STEP STEP ScaledMMFunctions TileFunctions WarpSpecializedGemm "
        "activation_functions as_stored_scheme asm_values divide factor_e4m3 in_columns in_order "
        "is_finite load_unquantized multiply multiply_group downcast_e4m3 open_blocks "
        "open_groups open_plain open_rows open_weights packed_weight pair per_word "
        "scale_acc_channels scale_acc_rows scale_of shifted specialize step_bytes step_e8m0 swap_ab_dot tile_words "
        "wait_for_mma weight_rows weight_tile with_zero"
    ),
    "moe_core.api.models": (
        "LayerRequest LayerSource ModelSettings PER_CALL QuantizedLinear choose describe find_layer "
        "names_experts quantized_linears read_layer unquantized_reason"
    ),
    "moe_core.api.libraries": (
        "FlashInferCutlassExperts TRTLLM_MAX_LOCAL_EXPERTS TRTLLM_ROUTING_METHODS TrtLlmExperts TrtLlmRouted "
        "TrtLlmRouting activate_and_quantize align_pairs align_workspaces aligned_rows block_major by_experts "
        "cutlass_claims fused_activation gather_rows interleave_halves mxfp8_input mxfp8_workspaces pad_matrices "
        "quantize_activation reduce_pairs sort_pairs sort_workspaces swap_halves trtllm_activation_arguments "
        "trtllm_activation_parameters trtllm_block_weights trtllm_claims trtllm_given_routing trtllm_row_order "
        "trtllm_scales trtllm_weights"
    ),
}


@pytest.mark.parametrize("module", NAMES)
def test_names_are_removed_with_a_new_major_version_only(module: str) -> None:
    """Where one must be removed, raise the major version of its API, and list the names of the new one."""
    assert {moe_core.INTERFACE_API.major, moe_core.FORMAT_API.major, moe_core.KERNEL_API.major} == {1}
    assert not set(NAMES[module].split()) - set(importlib.import_module(module).__all__)


def test_every_declared_module_is_guarded() -> None:
    assert {"moe_core", *NAMES} == set(DECLARED)


@pytest.mark.parametrize("module", [name for name in DECLARED if name != "moe_core"])
def test_declared_names_have_one_home(module: str) -> None:
    """Each name stands in one module, once, so that it means one thing wherever it is read."""
    names = importlib.import_module(module).__all__
    assert len(names) == len(set(names))
    others = {name for other in DECLARED if other != module for name in importlib.import_module(other).__all__}
    assert not others & set(names)


@pytest.mark.parametrize("module", ["api.experts", "api.kernels", "api.libraries", "api.sm90"])
def test_declared_names_are_used(module: str) -> None:
    """What no package here uses need not be kept for others."""
    used = {
        alias.name
        for source in SOURCES
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == f"moe_core.{module}"
        for alias in node.names
    }
    # what `GroupedExperts.plan` returns; what quantizers of other people's may use, as of this protocol
    kept = {"TilePlan", "divide", "downcast_e4m3"}
    # experts on kernels of others, whose calls are replayed too
    kept |= {"RecordableExperts"}
    # launch rules of an element type that core does not know
    kept |= {"Change", "GemvRules", "LaunchRules", "Regime", "Speed", "Tile", "add_rules", "within"}
    assert set(importlib.import_module(f"moe_core.{module}").__all__) - used <= kept
