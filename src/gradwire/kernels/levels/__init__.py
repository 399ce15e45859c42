"""The family ``levels``: stochastic rounding of blocks to any levels."""
