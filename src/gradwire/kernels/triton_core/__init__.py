"""Parts that the Triton kernels of all families share."""
