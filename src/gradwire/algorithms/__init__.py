"""Methods that remember something between steps, one file each."""
