"""The family ``indices``: ascending positions packed into bits."""
