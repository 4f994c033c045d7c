"""`pixelrag plot`: what runs have logged, drawn over their steps on one page."""
