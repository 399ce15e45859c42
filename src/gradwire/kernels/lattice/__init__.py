"""Rounding to a dithered cubic lattice, of whose points only a colour travels."""
