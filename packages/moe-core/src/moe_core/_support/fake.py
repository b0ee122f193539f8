"""Tensors without values, of torch's FakeTensorMode: memory estimates and tracers call models with them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_fake(x: Tensor) -> bool:
    """Whether ``x`` has no values, or what torch makes of it would have none."""
    return type(x) is FakeTensor or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
