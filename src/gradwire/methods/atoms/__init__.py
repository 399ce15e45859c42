"""ATOMO: drawn atoms of a decomposition."""
