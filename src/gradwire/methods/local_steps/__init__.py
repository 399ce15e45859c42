"""Local steps: an exchange every so many steps."""
