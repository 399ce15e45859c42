"""Built-in tasks trained data-parallel: data, training loop, local workers or a simulation, run folders."""
