"""What vLLM imports and is not installed, so that its selection and its modular kernel run on a machine without a GPU.

vLLM's own Python is real.  Packages that it asks for and that are not there, its compiled parts and its serving half
become modules whose attributes are classes that accept anything.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

#: vLLM's parts that serve: importing them would ask for hundreds of names of web and tokeniser packages
SERVING = (
    "vllm.entrypoints",
    "vllm.parser",
    "vllm.reasoning",
    "vllm.renderers",
    "vllm.tool_parsers",
    "vllm.distributed.kv_transfer.kv_connector.v1",
)
#: what vLLM asks for to find out whether it is there, in an `except ImportError`
OPTIONAL = (
    "aiter",
    "amdsmi",
    "deep_gemm",
    "flashinfer",
    "intel_extension_for_pytorch",
    "libtpu",
    "torch",
    "torch_tpu",
    "torchao",
    "tpu_inference",
    "triton",
    "triton_kernels",
    "zentorch",
)
#: modules whose imports are answered: vLLM's own, and of stand-ins' kind
ASKING = ("vllm",)


def _special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _Anything(type):
    """The type of a stand-in: every attribute is there."""

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


class _Serving(importlib.abc.MetaPathFinder):
    """Asked first."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name.startswith(SERVING):
            return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
        return None


class _Missing(importlib.abc.MetaPathFinder):
    """Asked last: what nothing else found, where vLLM imports it."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        if top in OPTIONAL or top == "vllm" or top in sys.stdlib_module_names or not _asked_by_vllm():
            return None
        return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)


def _asked_by_vllm() -> bool:
    """Whether the import statement that is being run stands in one of vLLM's modules."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("importlib", "_frozen_importlib")) and name != __name__:
            return bool(name.partition(".")[0] in ASKING)
        frame = frame.f_back  # type: ignore[assignment]
    return False


def install() -> None:
    """Once per process, before vLLM is imported."""
    if not any(isinstance(finder, _Missing) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Serving())
        sys.meta_path.append(_Missing())
