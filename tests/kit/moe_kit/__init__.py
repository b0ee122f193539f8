"""Test helpers shared by this repository's packages; others use `moe_core.testing`."""
