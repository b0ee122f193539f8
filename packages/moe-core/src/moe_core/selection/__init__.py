"""Selection: which backend runs a layer and why; the registry of installed plug-ins."""
