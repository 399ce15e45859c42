"""Trainings whose workers come and go: who belongs to one, in which order, and from which round on."""
