"""`pixelrag init`: a commented starter configuration for the user's own files."""
