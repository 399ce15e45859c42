"""Levels between zero and a scale: QSGD, its relatives, and adaptive levels."""
