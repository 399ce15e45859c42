"""Learned compression."""
