"""Links: the exchange of gradients or parameters over a process group, with state, failures and choice of a method."""
