"""Gossip: exchanges with neighbours alone."""
