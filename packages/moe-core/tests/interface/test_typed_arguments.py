"""Records whose arguments may be given by name say so to type checkers, in an ``__init__`` that only these read."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import fields

import pytest
from moe_core import FusedMoEConfig, MoEWeights


@pytest.mark.parametrize(
    ("record", "by_name"),
    [
        (FusedMoEConfig, {"activation", "dtype", "routing", "activation_format"}),
        (MoEWeights, {"weight_key", "activation_key"}),
    ],
)
def test_type_checkers_are_told_of_all_fields_and_names(record: type, by_name: set[str]) -> None:
    [kind] = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    assert isinstance(kind, ast.ClassDef)
    [init] = [node for node in ast.walk(kind) if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    arguments = [*init.args.args[1:], *init.args.kwonlyargs]
    stated = {argument.arg: ast.unparse(argument.annotation) for argument in arguments if argument.annotation}
    assert list(stated) == [field.name for field in fields(record)]
    for field in fields(record):
        kinds = set(stated[field.name].split(" | "))
        assert set(str(field.type).split(" | ")) <= kinds
        assert ("str" in kinds) == (field.name in by_name)
    required = [field.name for field in fields(record) if field.default is field.default_factory]
    given = len(init.args.defaults) + sum(default is not None for default in init.args.kw_defaults)
    assert len(arguments) - given == len(required)
