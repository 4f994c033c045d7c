"""GradCache: the gradient of a batch of any size in the memory of one chunk."""

from pixelrag.gradcache.minibatch import split_batch
from pixelrag.gradcache.step import StepResult, gradcache_step

__all__ = ["StepResult", "gradcache_step", "split_batch"]
