"""Exact statistics of segments."""
