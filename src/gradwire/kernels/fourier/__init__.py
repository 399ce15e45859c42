"""The family ``fourier``: discrete Fourier transforms of blocks of real elements."""
