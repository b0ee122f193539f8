"""The fused MoE layer: one pipeline for every scheme.

    layer       the pipeline, from hidden states to the layer's output
    call        one call: its tensors, and the helpers that schemes use
    scheme      interface of activation schemes: how x and h become operands
    groups      activations quantized in groups of columns, in registers
    scaled_mm   8-bit activations with a scale per token, per tensor or per expert
    plain       16-bit activations, gathered where columns are permuted or pre-scaled

Importing this package does not import Triton; its modules do.
"""
