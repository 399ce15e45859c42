"""Factors of low rank."""
