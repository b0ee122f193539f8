"""The experts of one layer in a checkpoint: their tensors, stacked into canonical weights."""
