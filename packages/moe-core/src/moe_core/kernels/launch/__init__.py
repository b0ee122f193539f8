"""Kernel launches: dispatch, recording, replay, ahead-of-time and cross-compilation."""
