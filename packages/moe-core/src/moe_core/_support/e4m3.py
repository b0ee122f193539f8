"""Table-based conversion of e4m3 codes to float32 on the CPU, two codes at a time.

torch converts e4m3 element by element, at about 0.1 to 0.2 billion elements per second and core. A table of all pairs
of codes (65536 x 8 bytes) fits into a core's L2 cache, and lookups are several times as fast. Every value is exact.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

#: Below this number of elements a lookup is not worth it.
_FEW = 4096


@cache
def _pairs() -> Tensor:
    """[65536]: the float32 values of two adjacent codes, as the bits of one float64."""
    codes = torch.arange(65536, dtype=torch.int32, device="cpu").to(torch.uint16)
    return codes.view(torch.float8_e4m3fn).float().view(torch.float64)


def decode_e4m3(codes: Tensor) -> Tensor:
    """Convert e4m3 codes to float32.

    Args:
        codes: float8_e4m3fn, any shape.

    Returns:
        New float32 tensor of the same shape.
    """
    even = codes.numel() % 2 == 0 and codes.is_contiguous() and codes.storage_offset() % 2 == 0
    if codes.device.type != "cpu" or codes.numel() < _FEW or not even:
        return codes.float()
    index = codes.view(-1).view(torch.uint16).int()
    return _pairs().index_select(0, index).view(torch.float32).view(codes.shape)
