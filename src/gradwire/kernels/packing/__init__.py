"""Digits packed into words, for all families."""
