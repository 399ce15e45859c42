"""The choice of the method for a round: a fixed one, the fastest in a trial, or a fallback."""
