"""Workers that step by themselves between exchanges."""
