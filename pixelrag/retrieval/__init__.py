"""Encoding collections with the model being trained."""
