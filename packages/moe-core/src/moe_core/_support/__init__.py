"""Helpers without knowledge of MoE layers. A closed list: a new one needs a second user."""
