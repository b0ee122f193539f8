"""Detection of FakeTensorMode tensors, which memory estimates and tracers call models with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_fake(x: Tensor) -> bool:
    """Whether ``x`` is a fake tensor or FakeTensorMode is active.

    Args:
        x: Any tensor.

    Returns:
        True if ``x``, or what torch computes from it, has no values.
    """
    return type(x) is FakeTensor or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
