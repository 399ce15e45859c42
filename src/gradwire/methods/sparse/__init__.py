"""Sparsification: a few of the elements."""
