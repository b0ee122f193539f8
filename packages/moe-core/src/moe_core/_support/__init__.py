"""Helpers that do not depend on MoE layers; add one only if it has two users."""
