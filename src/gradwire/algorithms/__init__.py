"""Which protocol carries which method, and (later) what remembers something between steps."""

from gradwire.algorithms.plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
