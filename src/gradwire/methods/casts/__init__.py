"""Casts: 32 or 16 bits an element."""
