"""Parts that all families compiled by Numba share."""
