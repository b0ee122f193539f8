"""Requirements and layouts of the kernel-library adapters. Imports no library."""

from __future__ import annotations

from moe_core import Requirement

FLASHINFER = Requirement("flashinfer", "flashinfer-python", "0.7.2", "moe-wna16[flashinfer]")
HUMMING = Requirement("humming", "humming-kernels", "0.1.19", "moe-wna16[humming]")
