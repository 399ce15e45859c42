"""Measured tables: training steps on links of known speed, kernels against memcpy."""
