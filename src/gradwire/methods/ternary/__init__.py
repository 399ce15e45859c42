"""Ternary: three levels an element."""
