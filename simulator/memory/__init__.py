"""Memory of a plan: what is allocated when, and what the allocators make of it."""
