"""`python -m pixelrag`, also what torchrun and the deepspeed launcher start on each rank."""

import sys

from pixelrag.cli import main

if __name__ == "__main__":
    sys.exit(main())
