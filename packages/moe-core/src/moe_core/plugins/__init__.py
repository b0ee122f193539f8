"""Plug-ins: entry points, fault isolation, and what schemes and backends register."""
