"""Levels: QSGD and its relatives, with fixed and adaptive levels."""
