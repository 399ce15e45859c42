"""What runs an exchange: links, buckets and steps on their way, state, failures, and the choice of a method."""
