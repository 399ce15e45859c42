"""One bit an element."""
