"""Signs, one bit an element: packing, votes, and back to one of two values."""
