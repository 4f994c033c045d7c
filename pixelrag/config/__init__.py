"""One frozen model a job, loaded from YAML files and flags with all mistakes reported at once.

Nothing in this package imports torch.
"""
