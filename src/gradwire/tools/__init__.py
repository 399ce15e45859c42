"""Programs built on ``import gradwire``: experiments, benchmarks, emulated clusters, reports, the command line."""
