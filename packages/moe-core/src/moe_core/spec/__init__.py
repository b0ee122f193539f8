"""What a layer is, as values: quant keys, configs, device, weights, activation, routing."""
