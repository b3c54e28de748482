"""Readers of measurements in other systems' published layouts: files in, plain rows out.

Aceso's operator tables are read by ``hardware_models.import_aceso``.
"""
