"""e2m1 weights and scales in the layouts of two libraries' Hopper kernels.

Both pack the eight codes of four bytes into a 32-bit word: each byte's low four bits go to the lower half, the high
four to the upper half. The bits of a half, from the highest, are

    15 s0   14 s3   13 d3   12 s1   11-10 c3   9 s2   8-6 m0   5-3 m1   2-0 m2

where s is the sign and m the other three bits of the code from byte 0, 1, 2. Of byte 3, d is the lowest bit and c the
two above it. Shifted left by 0, 3 and 6 bits and masked, the first three become bfloat16 numbers 2**-126 times their
value. The libraries differ in which four bytes form a word, in the order of words, and in the scales. All sizes are
padded sizes.
"""

from __future__ import annotations

import torch
from moe_core import TensorError
from torch import Tensor

#: for the code of each byte 0 to 3: (bit mask, shift distance)
_MOVES = (
    ((8, 12), (7, 6)),
    ((8, 9), (7, 3)),
    ((8, 6), (7, 0)),
    ((8, 11), (1, 13), (6, 9)),
)


def packed_words(codes: Tensor) -> Tensor:
    """Pack four bytes of codes into the words of the layout.

    Args:
        codes: uint8 [..., 4], two codes per byte.

    Returns:
        uint8 [..., 4], the bytes of a word, lowest first.
    """
    given = codes.contiguous().view(torch.int32)
    words = torch.zeros_like(given)
    for byte, moves in enumerate(_MOVES):
        # both codes of a byte at once, the higher one 16 bits further up
        pair = given >> 8 * byte & 255
        pair = pair & 15 | pair >> 4 << 16
        for bits, shift in moves:
            words |= (pair & (bits << 16 | bits)) << shift
    return words.view(torch.uint8)


def mixed_gemm_weights(w: Tensor) -> Tensor:
    """Reorder weights for FlashInfer's CUTLASS kernels.

    Args:
        w: uint8 [E, R, K / 2]; R a multiple of 16, K of 64.

    Returns:
        uint8 of the same shape.
    """
    experts, rows, width = w.shape
    _check("w", w, rows, 16, width, 32)
    # row = 16 a + 8 h + r, byte = 32 p + 16 i + 8 j + 4 c + t; a word is (h, c), stored in row 16 a + 8 j + r
    split = w.reshape(experts, rows // 16, 2, 8, width // 32, 2, 2, 2, 4)
    words = split.permute(0, 1, 6, 3, 4, 5, 8, 7, 2).reshape(experts, rows, width // 4, 4)
    return packed_words(words).view(experts, rows, width)


def mixed_gemm_scales(scale: Tensor) -> Tensor:
    """Reorder scales for FlashInfer's CUTLASS kernels.

    Args:
        scale: [E, R, K / 32]; R a multiple of 64, K of 128.

    Returns:
        [E, R / 64, K / 128, 16, 16].
    """
    experts, rows, groups = scale.shape
    _check("scale", scale, rows, 64, groups, 4)
    split = scale.reshape(experts, rows // 64, 4, 16, groups // 4, 4)
    return split.permute(0, 1, 4, 3, 2, 5).reshape(experts, rows // 64, groups // 4, 16, 16)


def swizzled_weights(w: Tensor) -> Tensor:
    """Reorder weights for `triton_kernels`.

    Args:
        w: uint8 [E, R, K / 2]; R a multiple of 16, K of 64.

    Returns:
        uint8 [E, R / 4, 2 K].
    """
    experts, rows, width = w.shape
    _check("w", w, rows, 16, width, 32)
    # row = 16 a + 8 i + 2 t + s, byte = 32 b + 8 q + 4 j + u; a word is (j, i)
    split = w.reshape(experts, rows // 16, 2, 4, 2, width // 32, 4, 2, 4)
    words = split.permute(0, 1, 3, 5, 4, 8, 6, 7, 2).reshape(experts, rows // 4, width, 4)
    return packed_words(words).view(experts, rows // 4, 4 * width)


def swizzled_scales(scale: Tensor, warps: int) -> Tensor:
    """Reorder scales for `triton_kernels`.

    Args:
        scale: [E, R, K / 32]; R a multiple of 32 ``warps``, K of 64.
        warps: warps of the kernel that reads them.

    Returns:
        [E, R / 32, K].
    """
    experts, rows, groups = scale.shape
    _check("scale", scale, rows, 32 * warps, groups, 2)
    # row = 16 (warps (2 a + i) + w) + 8 j + t, group = 2 b + g
    split = scale.reshape(experts, rows // (32 * warps), 2, warps, 2, 8, groups // 2, 2)
    return split.permute(0, 1, 3, 6, 2, 5, 7, 4).reshape(experts, rows // 32, 32 * groups)


def _check(name: str, tensor: Tensor, rows: int, row_multiple: int, width: int, multiple: int) -> None:
    if rows % row_multiple or width % multiple:
        raise TensorError(
            f"{name} has shape {list(tensor.shape)}, expected multiples of {row_multiple} rows and {multiple} columns"
        )
