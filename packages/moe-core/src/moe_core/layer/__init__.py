"""``FusedMoELayer`` and how it is loaded."""
