"""DPR's encoders (Karpukhin et al. 2020, arXiv:2004.04906) as the BERT that each of them holds."""

from __future__ import annotations

from typing import Any

from transformers import (
    BertConfig,
    BertModel,
    DPRContextEncoder,
    DPRQuestionEncoder,
    PreTrainedModel,
)

from pixelrag.errors import ModelError
from pixelrag.models.source import ModelSource

# By the architecture that config.json names; they differ in the names of their weights.
_CLASSES = {"DPRQuestionEncoder": DPRQuestionEncoder, "DPRContextEncoder": DPRContextEncoder}


def dpr_class(config: Any, source: ModelSource) -> type[PreTrainedModel]:
    """The class that a DPR folder was written by.

    Raises:
        ModelError: it is a reader, names no class, or has a projection behind the BERT.
    """
    names = getattr(config, "architectures", None) or ["none"]
    if names[0] not in _CLASSES:
        raise ModelError(
            f"{source.name} is a DPR model of the architecture {names[0]}; expected "
            f"{' or '.join(_CLASSES)}"
        )
    if config.projection_dim:
        raise ModelError(
            f"{source.name} projects its vectors to {config.projection_dim} numbers, which "
            "pixelrag would drop; give a DPR model with projection_dim 0"
        )
    return _CLASSES[names[0]]


def inner_bert(model: PreTrainedModel) -> BertModel:
    """The BERT inside, as a model of its own: its states' first one is DPR's vector.

    Its configuration becomes a BERT's, so that what is exported loads as a plain BERT.
    """
    bert = getattr(model, model.base_model_prefix).bert_model
    given = bert.config.to_dict()
    known = BertConfig().to_dict()
    kept = {key: given[key] for key in known if key in given and key != "model_type"}
    config = BertConfig(**kept)
    config._attn_implementation = bert.config._attn_implementation
    for module in bert.modules():
        if hasattr(module, "config"):
            module.config = config
    return bert
