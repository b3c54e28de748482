"""Cluster presets: one YAML file per cluster, named like the preset."""
