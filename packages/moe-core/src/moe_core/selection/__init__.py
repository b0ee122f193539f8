"""Selection: which backend runs a layer and why; the registry of schemes and formats that are installed."""
