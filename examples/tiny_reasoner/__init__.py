"""Invariant: `task` and `vocabulary` load without torch; the other modules remake the weights."""
