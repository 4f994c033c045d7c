"""Measurements of cost; `benchmarks/README.md` has the commands and what they gave."""
