"""Arithmetic on shifts: vectors of differences, and the shifts that follow them."""
