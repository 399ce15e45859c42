"""Feedback: what was not sent is sent later, or subtracted from what comes."""
