"""A few elements of many."""
