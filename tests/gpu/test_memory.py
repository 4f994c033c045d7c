"""What the distillation loss holds on the GPU at its real sizes."""

from __future__ import annotations

import pytest
import torch

from pixelrag.losses.kd import Head, Objective, Projected, distill_loss

VOCABULARY, CHUNK = 151_936, 2048


def _model(num_tokens: int, width: int, *, trained: bool) -> Projected:
    options = {"device": "cuda", "dtype": torch.bfloat16}
    weight = torch.randn(VOCABULARY, width, **options).div_(width**0.5)
    hidden = torch.randn(num_tokens, width, **options)
    return Projected(hidden.requires_grad_(trained), Head(weight.requires_grad_(trained)))


def _peak_bytes(num_tokens: int) -> int:
    """Of the loss and its gradient, above the models."""
    torch.manual_seed(0)
    student = _model(num_tokens, 512, trained=True)
    teacher = _model(num_tokens, 1024, trained=False)
    labels = torch.randint(VOCABULARY, (num_tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = distill_loss(
        student, teacher, labels, Objective("forward_kl", 2.0, 0.3),
        num_tokens=num_tokens, chunk_size=CHUNK,
    ).total  # fmt: skip
    loss.backward()
    assert torch.isfinite(loss)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_does_not_grow_with_tokens_times_vocabulary():
    """Qwen3's vocabulary: 4,096 more tokens have 1.2 GiB of logits in bf16, and cost none of it."""
    more = _peak_bytes(8192) - _peak_bytes(4096)
    logits = 4096 * VOCABULARY * 2
    assert more < 0.1 * logits, f"{more / 2**20:.0f} MiB"
