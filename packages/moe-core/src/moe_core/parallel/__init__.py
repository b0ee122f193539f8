"""Layers over several ranks: shards, expert placements, process groups, prepare/finalize."""
