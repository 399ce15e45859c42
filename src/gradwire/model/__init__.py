"""The performance model: predictions of the time of a step on other clusters, and of its bottleneck."""
