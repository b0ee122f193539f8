"""How much host code one eager call passes through before its launches are recorded for replay.

The bars are for readers and for host time alike: sizes and plans that depend on the layer and the number of tokens are
found once, and a call is a dozen steps. Tensors are on the meta device, and plans are those of an H200.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any, cast

import pytest
import torch
from moe_core import FusedMoEConfig, FusedMoELayer
from moe_core.kernels.launch.launch import record
from moe_core.spec.workspace import Workspace
from moe_core_meta_layers import on_h200
from moe_fp8.experts.triton import TritonFp8BlockExperts

#: functions of this project that a call may call
MOST_CALLS = 110
#: classes that they may belong to
MOST_CLASSES = 18

CONFIG = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=256, intermediate_size=256)


@pytest.fixture
def frames() -> list[tuple[str, str, bool]]:
    """Module, qualified name, and whether the hidden states came from another module, of each function called."""
    kernel = on_h200(TritonFp8BlockExperts, CONFIG)
    kernel.workspace = Workspace("meta")
    layer = FusedMoELayer(kernel, cast(Any, None))
    x = torch.empty(16, CONFIG.hidden_size, dtype=CONFIG.dtype, device="meta")
    weights = torch.empty(16, CONFIG.top_k, device="meta")
    ids = torch.empty(16, CONFIG.top_k, dtype=torch.int32, device="meta")
    found: list[tuple[str, str, bool]] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        module, code, caller = frame.f_globals.get("__name__", ""), frame.f_code, frame.f_back
        # neither initializers that dataclasses generate, nor what describes the launches that a call would make
        written = module.startswith("moe_") and not code.co_filename.startswith("<")
        if event == "call" and written and not code.co_qualname.startswith("Launch.of"):
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            passed = any(frame.f_locals.get(name) is x for name in names)
            crossed = caller is None or caller.f_globals.get("__name__") != module
            found.append((module, code.co_qualname, passed and crossed))

    for number in range(2):
        with record(), torch.no_grad():
            sys.setprofile(note if number else None)
            try:
                layer(x, topk_weights=weights, topk_ids=ids)
            finally:
                sys.setprofile(None)
    return found


def test_a_call_passes_through_few_functions(frames: list[tuple[str, str, bool]]) -> None:
    names = Counter(f"{module}.{name}" for module, name, _ in frames)
    assert 0 < names.total() <= MOST_CALLS, names.most_common()


def test_a_call_passes_through_few_classes(frames: list[tuple[str, str, bool]]) -> None:
    parts = [(module, *name.split(".")) for module, name, _ in frames]
    classes = {(module, name) for module, name, *inner in parts if inner and inner[0] != "<locals>"}
    assert 0 < len(classes) <= MOST_CLASSES, sorted(classes)


def test_no_module_gets_the_hidden_states_twice(frames: list[tuple[str, str, bool]]) -> None:
    modules = Counter(module for module, _, passed in frames if passed)
    assert set(modules.values()) == {1}, modules
