"""Training of built-in tasks: data, training loop, local or simulated workers, run folders."""
