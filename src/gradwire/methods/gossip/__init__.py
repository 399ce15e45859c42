"""Exchanges with neighbours."""
