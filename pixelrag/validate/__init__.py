"""`pixelrag validate`: a configuration and every row of its data, checked without training."""
