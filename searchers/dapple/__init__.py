"""DAPPLE (PPoPP 2021): dynamic programming over layers, devices and placements."""
