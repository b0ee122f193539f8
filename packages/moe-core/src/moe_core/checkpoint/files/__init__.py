"""Read the files of a checkpoint folder: safetensors shards, JSON and tensor names."""
