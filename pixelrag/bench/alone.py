"""A process that measures the memory of one case: the job comes on standard input as JSON."""

from __future__ import annotations

import json
import sys

from pixelrag.bench.cases import memory_of
from pixelrag.bench.suite import SUITES
from pixelrag.console import say

if __name__ == "__main__":
    job = json.load(sys.stdin)
    suite = SUITES[job["suite"]]
    found = memory_of(suite.workload().prepare, suite.config_class()(**job["config"]), job["case"])
    say(json.dumps(found))
