"""The family ``signs``: one bit for each element, votes, and decoding to one of two values."""
