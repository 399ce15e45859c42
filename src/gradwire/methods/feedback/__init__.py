"""Memories of what was not sent: error feedback, EF21, DIANA, momenta."""
