"""The portable tile kernel (sm_80 and newer, gfx942, gfx950): its schedule, operands, epilogue and launch."""
