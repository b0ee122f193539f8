"""Read the experts of one layer and stack their tensors into canonical weights."""
