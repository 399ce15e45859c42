"""Methods around methods that remember nothing themselves."""
