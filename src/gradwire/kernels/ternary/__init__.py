"""Trits: encoding, sums, decoding."""
