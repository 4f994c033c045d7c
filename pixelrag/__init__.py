"""pixelrag: trains visual and textual retrievers with the exact gradients of very large batches.

Importing this package imports nothing else: `pixelrag --help` must answer before torch would load.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
