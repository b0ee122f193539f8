"""The fused MoE layer: one pipeline for every scheme.

layer       the pipeline, from hidden states to the layer's output
scheme      what an activation scheme says: how x and h become operands
groups      activations quantised in groups of columns, in registers
rows        activations of 8 bits with a scale per token, per tensor or per expert
pre_scaled  activations that are multiplied by pre-scales of their columns first
"""
