"""Patterns from config files: what they match, and that none of them takes long."""

from __future__ import annotations

import fnmatch
import re
import time
from pathlib import Path
from typing import Any

import pytest
from moe_core import CheckpointError
from moe_core.checkpoint import Checkpoint, find_layer
from moe_core.checkpoint.config.patterns import LONGEST, NamePatterns
from moe_core.checkpoint.config.quant_args import QuantEntries
from moe_core.checkpoint.tools.compressed_tensors import quant_group
from moe_core.checkpoint.tools.modelopt import quant_algo
from moe_core.checkpoint.tools.overrides import with_overrides
from moe_core.checkpoint.tools.quark import quark_layer
from moe_core_checkpoints import expert_tensors, write

NAMES = [
    "model.layers.0.mlp.experts.0.up_proj",
    "model.layers.10.block_sparse_moe.experts.63.w1",
    "lm_head",
    "model.layers.0.mlp.gate",
    "a" * LONGEST,
]
PATTERNS = [
    r".*experts.*",
    r".*mlp\.experts\.\d+\.(gate|up|down)_proj$",
    r"^model\.layers\.(?!1\.)\d{1,2}\.mlp\..*",
    r"(?i)MODEL\.layers\.[0-9]+\.",
    r"model\.layers\.(0|1)\.[^.]+\.experts\.\d+\.w[123]",
    r"a{1000}$",
    r"",
    r"gate",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_regular_expressions_match_as_re_does(pattern: str) -> None:
    compiled = NamePatterns().regular(pattern, "here")
    for name in NAMES:
        assert compiled.match(name) == (re.match(pattern, name) is not None)
        assert compiled.search(name) == (re.search(pattern, name) is not None)


@pytest.mark.parametrize(
    "pattern", ["*experts*", "model.layers.?.mlp.*", "*.[0-9].w1", "*[!a]", "[", "lm_head", "***a*"]
)
def test_wildcards_match_as_fnmatch_does(pattern: str) -> None:
    compiled = NamePatterns().wildcard(pattern, "here")
    for name in NAMES:
        assert compiled.match(name) == fnmatch.fnmatchcase(name, pattern)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "missing )"),
        ("*a", "nothing to repeat"),
        (r"\p", "bad escape"),
        ("(?R)", "unknown extension"),
        ("(?|a|b)", "unknown extension"),
        ("x" * (LONGEST + 1), "it is too long"),
        ("(?:(?:a?){1000}){1000}", "its counts multiply to more than 10000"),
        ("a{99999}", "its counts multiply to more than 10000"),
        ("(?:foo){e<=1}", "'{' must begin a count"),
        ("a{,}", "it has a count without a number"),
        ("[[a]", "nested sets are not supported"),
        ("[a--b]", "nested sets are not supported"),
        ("(" * 400 + ")" * 400, ""),
    ],
)
def test_what_is_no_pattern(pattern: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"expression: {reason}")) as caught:
        NamePatterns().regular(pattern, "config.json: dynamic: the key")
    assert "config.json: dynamic: the key '" in str(caught.value)


def test_names_have_a_greatest_length() -> None:
    with pytest.raises(CheckpointError, match=f"{LONGEST}"):
        NamePatterns().regular(".*", "here").match("a" * (LONGEST + 1))


def test_all_patterns_of_a_reading_share_its_time() -> None:
    patterns = NamePatterns(seconds=0.2)
    slow = [patterns.regular("(a|aa)+$", f"config.json: key {i}:") for i in range(5)]
    start = time.monotonic()
    for pattern in slow:
        with pytest.raises(CheckpointError, match=r"config.json: .*'\(a\|aa\)\+\$'"):
            pattern.match("a" * 60 + "b")
    assert time.monotonic() - start < 1


EVIL = "(.|..)+(?<=[#%])$"
LINEAR = {"weights": {"type": "int", "num_bits": 8}}


@pytest.mark.parametrize("tool", ["targets", "transforms", "dynamic", "extra_config"])
def test_every_tools_patterns_are_bounded(tmp_path: Path, tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the key and the pattern."""
    monkeypatch.setattr("moe_core.checkpoint.config.patterns.NamePatterns.__init__.__defaults__", (0.1,))
    layer = find_layer(Checkpoint.open(write(tmp_path, expert_tensors())))
    place = {"location": "input", "targets": [f"re:{EVIL}"]}
    groups: dict[str, Any] = {"a": {"targets": [f"re:{EVIL}"], **LINEAR}, "b": {"targets": ["Linear"], **LINEAR}}
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=re.escape(f"'{EVIL}'")) as caught:
        if tool == "targets":
            quant_group({"config_groups": groups}, layer)
        elif tool == "transforms":
            transform = {"config_groups": {"R4": {"apply": [place]}}}
            quant_group({"config_groups": {"b": groups["b"]}, "transform_config": transform}, layer)
        else:
            with_overrides(QuantEntries({tool: {EVIL: {"bits": 8}}}, "config.json"), tool, layer)
    assert time.monotonic() - start < 5
    assert {"targets": "config_groups.a", "transforms": "transform_config"}.get(tool, tool) in str(caught.value)


@pytest.mark.parametrize("tool", ["modelopt", "quark"])
def test_wildcards_of_tools_are_bounded(tmp_path: Path, tool: str) -> None:
    layer = find_layer(Checkpoint.open(write(tmp_path, expert_tensors())))
    evil = "*" + "m*o*" * 200 + "#"
    start = time.monotonic()
    if tool == "modelopt":
        parts = {evil: {"quant_algo": "FP8"}, "model": {"quant_algo": "FP8"}}
        assert quant_algo({"quant_algo": "MIXED_PRECISION", "quantized_layers": parts}, layer)[0] == "FP8"
    else:
        found = quark_layer({"layer_quant_config": {evil: {}}, "global_quant_config": {"weight": {}}}, layer)
        assert found.where.endswith("global_quant_config")
    with pytest.raises(CheckpointError, match=r"key '\*+"):
        if tool == "modelopt":
            quant_algo({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"*" * 2000: {}}}, layer)
        else:
            quark_layer({"layer_quant_config": {"*" * 2000: {}}, "global_quant_config": {}}, layer)
    assert time.monotonic() - start < 5
