"""Methods of the literature, one folder for each family."""
