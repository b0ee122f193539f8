"""Layer specification as values: quant keys, configs, device, weights, routing."""
