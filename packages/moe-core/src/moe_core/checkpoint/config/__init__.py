"""Read a model's config.json: families, keys, quantization settings and routing."""
