"""What the families compiled by Numba share."""
