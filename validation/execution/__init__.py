"""A plan on real devices: processes and groups, stages, passes, gradients."""
