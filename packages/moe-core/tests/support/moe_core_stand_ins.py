"""Stand-ins for what an engine imports and is not installed, so that its Python runs on a machine without a GPU.

The engine's own Python is real.  Packages that it asks for and that are not there become modules whose attributes are
classes that accept anything; so do parts of the engine that are named.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


def _special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _Anything(type):
    """The type of a stand-in: every attribute is there, and subclasses take any keywords."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_: Any) -> Any:
        return super().__new__(cls, name, bases, body)

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, body)

    def __getattr__(cls, name: str) -> Any:
        if _special(name):
            raise AttributeError(name)
        return _anything(name)

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())


def _anything(name: str) -> type:
    """A class that can be made, called, subscripted, inherited from, and used as a decorator."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def attribute(self: Any, asked: str) -> Any:
        if _special(asked):
            raise AttributeError(asked)
        return _anything(asked)()

    def schema(cls: type, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    body = {
        "__init__": lambda self, *args, **kwargs: None,
        "__call__": call,
        "__getattr__": attribute,
        "__init_subclass__": classmethod(lambda cls, **_: None),
        "__class_getitem__": classmethod(lambda cls, item: cls),
        "__get_pydantic_core_schema__": classmethod(schema),
    }
    return _Anything(name, (), body)


class _Module(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if _special(name):
            raise AttributeError(name)
        value = _anything(name)
        setattr(self, name, value)
        return value


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "0"  # type: ignore[attr-defined]


class _Parts(importlib.abc.MetaPathFinder):
    """Asked first: parts of the engine itself."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        self.parts = parts

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if self.parts and name.startswith(self.parts):
            return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
        return None


class _Missing(importlib.abc.MetaPathFinder):
    """Asked last: what nothing else found, where the engine imports it."""

    def __init__(self, engine: str, optional: tuple[str, ...]) -> None:
        self.engine = engine
        self.real = {engine, *optional, *sys.stdlib_module_names}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        # what is in a stand-in is there for everyone: others have seen that it is
        if top in self.real or not (isinstance(sys.modules.get(top), _Module) or self._asks()):
            return None
        return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)

    def _asks(self) -> bool:
        """Whether the import statement that is being run stands in one of the engine's modules."""
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if not name.startswith(("importlib", "_frozen_importlib")):
                return bool(name.partition(".")[0] == self.engine)
            frame = frame.f_back  # type: ignore[assignment]
        return False


def install(engine: str, *, optional: tuple[str, ...], parts: tuple[str, ...] = ()) -> None:
    """Once per process, before the package ``engine`` is imported.

    ``optional``: packages that it asks for to find out whether they are there, in an `except ImportError`; ``parts`` of
    its own that are stand-ins too.
    """
    if not any(isinstance(finder, _Missing) and finder.engine == engine for finder in sys.meta_path):
        sys.meta_path.insert(0, _Parts(parts))
        sys.meta_path.append(_Missing(engine, optional))
