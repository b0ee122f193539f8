"""What plug-ins implement: experts, claims, prepare/finalize, checkpoint formats, the order of backends."""
