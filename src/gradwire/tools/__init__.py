"""What is built on ``import gradwire``: trainings, benchmarks, networks, reports and the command line."""
