"""The family ``sketch``: count sketches, from whose sums the large elements of a vector are estimated."""
