"""Gluon names that differ between Triton versions, with those of 3.6 as a fallback."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_rows = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_DESCRIPTOR = gl.shared_memory_descriptor
reinterpret = _DESCRIPTOR.reinterpret if hasattr(_DESCRIPTOR, "reinterpret") else _DESCRIPTOR._reinterpret
