"""A Triton kernel that writes behind a tensor: a tool that reports nothing here sees nothing."""

import torch
import triton
import triton.language as tl


@triton.jit
def planted_kernel(out, B: tl.constexpr):
    at = tl.arange(0, B)
    tl.store(out + at, at)


out = torch.zeros(100, dtype=torch.int32, device="cuda")
planted_kernel[(1,)](out, B=128)
try:
    torch.cuda.synchronize()
except Exception as error:
    print("after the planted write:", str(error).splitlines()[0])
print("planted.py has run")
