"""The fused MoE layer: one pipeline for every scheme.

    layer       the pipeline, from hidden states to the layer's output
    call        one call: its tensors, and what schemes ask of it
    scheme      what an activation scheme says: how x and h become operands
    groups      activations quantised in groups of columns, in registers
    scaled_mm   activations of 8 bits with a scale per token, per tensor or per expert
    plain       activations in 16 bits, gathered where columns are permuted or pre-scaled

Importing this package imports no Triton; its modules do.
"""
