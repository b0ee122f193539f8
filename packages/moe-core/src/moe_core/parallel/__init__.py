"""Layers over several ranks: shards, placements of experts, process groups, prepare/finalize."""
