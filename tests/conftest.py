"""Settings of all tests."""

import os

# No test fetches anything: a name that is no folder must fail at once, not after retries. Set
# before any test imports huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
