"""Prepare/finalize classes, which dispatch tokens and combine results; one file per class."""
