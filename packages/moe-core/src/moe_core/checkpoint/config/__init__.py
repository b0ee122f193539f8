"""A model's config.json: families, keys, quantization settings, routing."""
