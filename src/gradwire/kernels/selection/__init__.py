"""The family ``selection``: elements of the largest magnitude, or above a threshold."""
