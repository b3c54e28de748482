"""What a machine takes: operators, memory, collectives, overlap, launches."""
