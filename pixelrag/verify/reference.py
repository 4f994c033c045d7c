"""The oracle: one process, float64, the whole global batch in one graph, plain autograd."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pixelrag.gradcache.minibatch import split_batch
from pixelrag.losses.contrastive import Objective
from pixelrag.losses.temperature import scale_from_log
from pixelrag.verify.cases import OPTIONS, Case
from pixelrag.verify.inputs import batch_of_rank, load_biencoder
from pixelrag.verify.naive import naive_loss


@dataclass(frozen=True, slots=True)
class Reference:
    """The global batch's loss and gradients.

    ``temperature_terms`` is the sum of the absolute values of each query's share in the gradient
    of the log scale. Shares of both signs can cancel to nearly nothing; rounding is proportional
    to their size, not to what is left of them.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    temperature_terms: float

    def save(self, file: Path) -> None:
        """Write the reference to ``file``."""
        numbers = torch.tensor([self.loss, self.temperature_terms], dtype=torch.float64)
        save_file(self.gradients | {"": numbers}, file)

    @classmethod
    def read(cls, file: Path) -> Reference:
        """Read what `save` wrote."""
        gradients = load_file(file)
        loss, temperature_terms = gradients.pop("").tolist()
        return cls(loss, gradients, temperature_terms)


class Oracle:
    """Computes references and keeps them in a folder, where the next engine's run finds them.

    Args:
        folder: as given to ``inputs.write_inputs``; of one process.
        world_size: ranks whose batches make the global batch.
    """

    def __init__(self, folder: Path, world_size: int) -> None:
        self._folder = folder
        self._world_size = world_size
        self._models: dict = {}

    def __call__(self, case: Case) -> Reference:
        """Return the reference of ``case``; engines and, without dropout, chunk sizes share it."""
        chunk = case.chunk_size if case.dropout else "any"
        key = (case.training, case.dropout, chunk, case.negatives, case.modality, case.loss)
        file = self._folder / f"reference {' '.join(map(str, key))}.safetensors"
        if not file.exists():
            self._compute(case).save(file)
        return Reference.read(file)

    def _compute(self, case: Case) -> Reference:
        model, preprocessor = self._model(case)
        model.zero_grad()
        queries, documents, positives, content, num_documents = [], [], [], [], 0
        for rank in range(self._world_size):
            query, document, pairs = batch_of_rank(case, rank, self._folder, preprocessor)
            seed_rank(rank)  # dropout falls by rank and by chunk, in the engines' order
            for chunk in split_batch(query, case.chunk_size):
                embedding, log_scale = model("query", **_double(chunk))
                queries.append(embedding)
            for chunk in split_batch(document, case.chunk_size):
                documents.append(model("document", **_double(chunk))[0])
            for found in pairs.positive_BK.tolist():
                positives.append([num_documents + place for place in found if place >= 0])
            content += [] if pairs.content_M is None else pairs.content_M.tolist()
            num_documents += len(document["attention_mask"])
        query_BD, document_ND = torch.cat(queries), torch.cat(documents)
        scale = scale_from_log(log_scale)
        objective = Objective(**OPTIONS) if case.loss == "options" else Objective()
        loss = naive_loss(
            objective, query_BD, document_ND, positives, scale, content=content or None
        )
        loss.backward()
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        with torch.no_grad():
            logits_BN = query_BD @ document_ND.T * scale
            expected_B = (logits_BN.softmax(1) * logits_BN).sum(1)
            first_B1 = torch.tensor([found[:1] for found in positives])
            terms_B = expected_B - logits_BN.gather(1, first_B1).squeeze(1)
        return Reference(loss.item(), gradients, float(terms_B.abs().mean()))

    def _model(self, case: Case):
        key = (case.training, case.dropout)
        if key not in self._models:
            # Padding is computed here, unless that would draw other numbers for dropout.
            self._models[key] = load_biencoder(
                self._folder, *key, torch.float64, unpadded=case.dropout
            )
        return self._models[key]


def seed_rank(rank: int) -> None:
    """Start a rank's random stream for one step."""
    torch.manual_seed(1_000 + rank)


def _double(chunk: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in chunk.items()}
