"""Looks at the cluster before a run does: `pixelrag launch-check`."""
