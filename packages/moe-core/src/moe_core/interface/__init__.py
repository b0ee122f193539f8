"""Plug-in interfaces: experts, claims, prepare/finalize, checkpoint formats, backend order."""
