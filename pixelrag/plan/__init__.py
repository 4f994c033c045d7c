"""Predicts memory, traffic and time of a job on hardware that is not here."""
