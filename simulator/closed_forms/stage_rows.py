"""What a microbatch takes in a stage, as columns of a row: what the exact times of pipelines are computed from."""

from __future__ import annotations

# The stage's forward and input-gradient pass (a whole backward pass is the input's); what occupies it once it has sent
# that on: its weight-gradient pass, reductions that it waits for, what its host takes longer than its device;
# where it computes on meanwhile, what it sends to the next stage and to the one before; how long its forward pass, and
# its input-gradient pass, waits after what it needs has come from there; what it does once, behind its last pass; and
# by how much its first pass of gradients is shorter than later ones (0 if it has only one).
FORWARD, INPUT, WEIGHT, DOWN, UP, FORWARD_LAG, INPUT_LAG, ONCE, LESS = range(9)
NUM_COLUMNS = 9
