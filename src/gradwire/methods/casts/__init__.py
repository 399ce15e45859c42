"""Casts: no compression, or sixteen bits an element."""
