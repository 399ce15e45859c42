"""ATOMO: few atoms of a decomposition."""
