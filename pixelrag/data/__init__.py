"""Training data: pairs for retrievers, texts for language models, their checks, and their order."""
