"""Losses as pure functions of tensors: no distributed code, no models."""
