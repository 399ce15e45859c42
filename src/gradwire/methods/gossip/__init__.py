"""Gossip: exchanges between neighbours in a graph."""
