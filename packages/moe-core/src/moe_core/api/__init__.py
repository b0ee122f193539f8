"""The declared API: the modules and names that other packages may import from moe-core."""
