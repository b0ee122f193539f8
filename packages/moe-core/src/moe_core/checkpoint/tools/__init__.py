"""The quantization configs that each tool writes: one file per tool."""
