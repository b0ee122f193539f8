"""``moe_core.kernels`` could be a separate distribution: layers above it use the names listed here and no others."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ROOT / "packages/moe-core/src/moe_core"

#: by module of ``moe_core.kernels``
USED = {
    "experts.grouped": "GroupedExperts",
    "gemm.heuristics.tuned": "Tuned TunedRange",
    "launch.compile_ahead": "Progress compile_ahead compile_in_threads distinct",
    "launch.compile_target": "Target compiling_for",
    "launch.current_device": "current",
    "launch.launch": "Launch host_step record",
    "launch.replay": "Replay",
    "ops._backend": "interpreting use_triton",
    "ops.dispatch": "UnpackedTokens count_destinations held_experts pack_all pack_tokens unpack",
    "ops.exchange": (
        "ExchangeBuffer ExchangeShape MAX_RANKS arrived_tokens await_tokens combine_results push_results push_tokens"
    ),
    "ops.online": "OnlineQuantization",
    "ops.quantize": "quantize_activation",
    "ops.reduce": "reduce_pairs reduce_pairs_torch",
    "ops.routing": "fused_route",
    "ops.token_layout": "TokenCode TokenLayout",
    "tuning.choice": "TuningChoice choose name_of",
    "tuning.limits": "Plan",
    "tuning.places": "user_path",
    "tuning.profile": "TunedLayer TuningProfile",
    "tuning.search": "Rig search",
}


def test_upper_layers_use_the_listed_names() -> None:
    found: dict[str, set[str]] = {}
    for path in sorted(CORE.rglob("*.py")):
        # the API hands names on; the kit looks at everything
        if path.relative_to(CORE).parts[0] in ("kernels", "api", "testing") or path == CORE / "__init__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moe_core.kernels"):
                module = (node.module or "").removeprefix("moe_core.kernels").removeprefix(".")
                found.setdefault(module, set()).update(alias.name for alias in node.names)
    assert found == {module: set(names.split()) for module, names in USED.items()}
