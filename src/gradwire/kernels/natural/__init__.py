"""The family ``natural``: random rounding to powers of two."""
