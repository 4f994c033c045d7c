"""Training pairs: PixelRAG's JSONL, its checks, and the order in which rows are served."""
