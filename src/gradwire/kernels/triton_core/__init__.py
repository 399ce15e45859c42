"""What the kernels of all families that Triton compiles share."""
