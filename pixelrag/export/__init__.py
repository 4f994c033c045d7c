"""Writes trained models in forms that other tools load."""
