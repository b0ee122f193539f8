"""Stand-ins for what SGLang imports and its tests here do not run: servers, compiled kernels, other GPUs' libraries.

A module that is not installed, and that SGLang itself asks for, becomes an empty one whose every name is a class that
takes anything.  What is installed is imported as it is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

#: asked for in order to see whether they are there
OPTIONAL = (
    "flashinfer",
    "deep_gemm",
    "aiter",
    "vllm",
    "amdsmi",
    "torch_npu",
    "intel_extension_for_pytorch",
    "mooncake",
)


class Anything(type):
    """The class of every stand-in: has every attribute, and may be subclassed with any keywords."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_: Any) -> Any:
        return super().__new__(cls, name, bases, body)

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, body)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


def _stand_in(name: str) -> type:
    def call(self: object, *arguments: Any, **_: Any) -> Any:
        # as a decorator it leaves the function alone
        return arguments[0] if arguments and callable(arguments[0]) else self

    def attribute(self: object, other: str) -> Any:
        if other.startswith("__"):
            raise AttributeError(other)
        return _stand_in(other)()

    body = {
        "__init__": lambda self, *_, **__: None,
        "__call__": call,
        "__getattr__": attribute,
        "__init_subclass__": classmethod(lambda cls, **_: None),
        "__class_getitem__": classmethod(lambda cls, _: cls),
    }
    return Anything(name, (), body)


class MissingModule(types.ModuleType):
    """A module that is not there."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _stand_in(name)
        setattr(self, name, found)
        return found


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last: finds what no other finder does, for SGLang and for modules that it found already."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top in OPTIONAL or top == "sglang" or top in sys.stdlib_module_names:
            return None
        if top not in self.names and not _asked_by_sglang():
            return None
        self.names.add(top)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return MissingModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _asked_by_sglang() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] == "sglang":
            return True
        if not name.startswith(("importlib", "_frozen_importlib")):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False


def install() -> Missing:
    """Put the stand-ins behind everything that can be imported."""
    missing = Missing()
    sys.meta_path.append(missing)
    return missing
