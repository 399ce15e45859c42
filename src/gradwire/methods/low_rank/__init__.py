"""Low rank: gradients of matrices as products of thin factors."""
