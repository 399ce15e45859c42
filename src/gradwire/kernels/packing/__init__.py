"""Small integers packed into words."""
