"""Methods around any other method."""
