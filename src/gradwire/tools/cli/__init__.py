"""The command line: parses, then makes one call into the library. Nothing imports it."""
