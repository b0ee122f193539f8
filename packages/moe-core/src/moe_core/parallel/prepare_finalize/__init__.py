"""Prepare/finalize classes, which move tokens to the experts and results back: one file per class."""
