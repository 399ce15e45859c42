"""The family ``rotation``: random signs, then a Walsh-Hadamard transform of each block."""
