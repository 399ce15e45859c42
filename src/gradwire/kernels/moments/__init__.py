"""The family ``moments``: exact statistics of segments."""
