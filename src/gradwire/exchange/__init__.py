"""What carries any method: its interface, payloads, protocols, drivers and planning."""
