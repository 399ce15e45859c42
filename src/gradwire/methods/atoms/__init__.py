"""ATOMO: sampled atoms of a decomposition."""
