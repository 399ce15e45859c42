"""The family ``patches``: what changed between two states of memory, and by how many units in the last place."""
