"""The gradient-equivalence matrix that a user can run on their own machine."""
