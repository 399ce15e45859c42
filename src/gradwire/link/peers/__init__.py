"""The other processes of a training: which are alive, the failures they report, and which one broke a link."""
