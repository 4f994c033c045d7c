"""`python -m pixelrag`, also what torchrun and the deepspeed launcher start on each rank."""

from pixelrag.cli import run

if __name__ == "__main__":
    run()
