"""Signs: one bit an element."""
