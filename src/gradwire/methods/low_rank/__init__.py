"""Low rank: factors of matrices."""
