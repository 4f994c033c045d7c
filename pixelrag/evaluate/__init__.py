"""Figures of merit: how well a retriever ranks, and how sure a difference is."""
