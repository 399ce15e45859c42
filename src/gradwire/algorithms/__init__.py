"""How buckets are exchanged; what remembers something between steps."""

from gradwire.algorithms.plan import Algorithm, Plan, make_plan

__all__ = ["Algorithm", "Plan", "make_plan"]
