"""From a plan and a problem to the time and memory of one training iteration."""
