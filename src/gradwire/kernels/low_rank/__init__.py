"""The family ``low_rank``: products of matrices and thin factors, and orthonormal factors."""
