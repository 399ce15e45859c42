"""Casts to fewer bits."""
