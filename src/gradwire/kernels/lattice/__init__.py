"""The family ``lattice``: rounding to a dithered cubic lattice, and sending the colours of its points."""
