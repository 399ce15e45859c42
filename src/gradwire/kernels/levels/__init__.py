"""Stochastic rounding of blocks to any levels, packed."""
