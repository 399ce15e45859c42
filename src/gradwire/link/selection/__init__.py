"""Which method a round travels by: a fixed one, the fastest by trial, or a fallback."""
