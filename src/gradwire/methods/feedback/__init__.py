"""Feedback: residuals that are added to later gradients, and shifts that are subtracted before compression."""
