"""The other processes of a training: which of them live, what they say of failures, and whose end broke a link."""
