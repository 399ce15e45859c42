"""Sparsification: few of the elements."""
