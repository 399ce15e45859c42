"""The performance model: what a step would take elsewhere, and what bounds it."""
