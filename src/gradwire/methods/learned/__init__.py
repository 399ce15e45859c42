"""Learned gradient compression."""
