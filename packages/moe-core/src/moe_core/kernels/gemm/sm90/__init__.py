"""Hopper only (sm_90): warp-specialized kernels on TMA and WGMMA."""
