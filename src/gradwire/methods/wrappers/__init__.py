"""Wrappers around other methods."""
