"""Benchmarks: training steps on networks of known speed, and kernels against memcpy."""
