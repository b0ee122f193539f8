"""Router logits whose bits do not depend on the batch size."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def fixed_rows_product(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply ``x`` [M, K] by ``matrix`` [K, N] in products of one fixed size.

    The bits of a row then do not depend on M.

    Args:
        x: ``[M, K]``.
        matrix: ``[K, N]``.

    Returns:
        ``[M, N]``.
    """
    # On a GPU all rows of a tile are summed alike; on a CPU results differ by row position too.
    rows = 16 if x.is_cuda else 1
    parts = torch.split(F.pad(x, (0, 0, 0, -len(x) % rows)), rows)
    return torch.cat([part.clone() @ matrix for part in parts])[: len(x)]
