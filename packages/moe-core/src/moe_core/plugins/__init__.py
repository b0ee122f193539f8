"""Plug-ins: entry points, faults, and what a scheme and a backend register."""
