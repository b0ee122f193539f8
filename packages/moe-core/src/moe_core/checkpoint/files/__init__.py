"""The files of a checkpoint folder: safetensors shards, JSON, names of tensors."""
