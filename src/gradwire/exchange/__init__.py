"""The exchange of any method: interface of methods, payloads, protocols, drivers and planning."""
