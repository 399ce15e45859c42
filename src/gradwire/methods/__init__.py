"""Methods of the literature, a folder a family."""
