"""Training: the one loop and its parts, each usable alone."""
