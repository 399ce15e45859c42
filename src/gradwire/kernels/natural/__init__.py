"""Random rounding to powers of two."""
