"""Discrete Fourier transforms of blocks of real elements, and back."""
