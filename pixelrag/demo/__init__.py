"""The demonstration: real data from the running Python, and jobs that train on it in minutes."""
