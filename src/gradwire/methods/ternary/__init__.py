"""TernGrad."""
