"""Portable: weights in fragment order, the order in which tensor-core registers hold them; dequantized in registers."""
