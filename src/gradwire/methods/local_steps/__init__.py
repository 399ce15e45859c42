"""Local steps: an exchange every few optimizer steps."""
