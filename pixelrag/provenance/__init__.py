"""What an artifact is, and whether two belong together: `pixelrag inspect`."""
