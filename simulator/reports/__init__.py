"""What a result shows: breakdown, critical path, difference of two, timeline, trace, memory."""
