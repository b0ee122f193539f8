"""The SGLang that is here is one that the package joins, and the stand-ins of the other tests say what it says."""

from __future__ import annotations

import types

import moe_sglang
import moe_sglang_engine
import pytest
from moe_sglang.engine import ENGINE


def test_its_version_is_in_the_range() -> None:
    assert ENGINE.reason_against_version() is None


def test_sglang_loads_the_plug_in(sglang: types.SimpleNamespace) -> None:
    from sglang.srt import plugins

    found = plugins.load_plugins_by_group(plugins.GENERAL_PLUGINS_GROUP)
    assert found["moe_sglang"] == (moe_sglang.register, "moe-sglang")


@pytest.mark.parametrize("name", ["MoeRunnerConfig", "TritonMoeQuantInfo"])
def test_stand_ins_have_fields_of_sglangs(sglang: types.SimpleNamespace, name: str) -> None:
    mine = getattr(moe_sglang_engine, name).__dataclass_fields__
    theirs = getattr(sglang, name).__dataclass_fields__
    assert {field: mine[field].default for field in mine} == {field: theirs[field].default for field in mine}
    if name == "TritonMoeQuantInfo":
        # a field more may say something that the table does not know
        assert mine.keys() == theirs.keys()


@pytest.mark.parametrize("name", ["StandardTopKOutput", "StandardDispatchOutput", "StandardCombineInput"])
def test_stand_ins_are_tuples_like_sglangs(sglang: types.SimpleNamespace, name: str) -> None:
    mine, theirs = getattr(moe_sglang_engine, name), getattr(sglang, name)
    assert mine._fields == theirs._fields
    assert mine._field_defaults == theirs._field_defaults
