"""Products of matrices and thin factors, and orthonormal factors."""
