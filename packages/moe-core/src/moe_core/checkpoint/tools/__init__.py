"""Interpret the quantization config of each tool; one module per tool."""
