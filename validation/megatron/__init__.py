"""Megatron-Core itself, its layers, schedules, buffers and optimizer, traced without a device."""
