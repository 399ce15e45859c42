"""The family ``ternary``: trits, their sums, and decoding."""
