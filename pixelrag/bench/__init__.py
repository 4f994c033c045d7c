"""Measures speed and memory on the machine at hand, suite by suite, and reports what was found."""
