"""Lattice quantisation."""
