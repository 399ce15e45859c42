"""Rotations before rounding: DRIVE, EDEN, QUIC-FL."""
