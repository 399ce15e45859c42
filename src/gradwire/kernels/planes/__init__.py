"""The bytes of numbers by their place: all highest bytes, then all second ones, and so on."""
