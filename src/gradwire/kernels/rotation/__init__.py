"""Random rotations of blocks: signs, then a Walsh-Hadamard transform."""
