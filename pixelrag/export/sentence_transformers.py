"""What makes an exported folder one of sentence-transformers (6.2 and newer).

Without these files the library guesses: mean pooling, and the tokenizer's chat template around
every text where there is one. With them `SentenceTransformer(folder)` pools, truncates and prompts
as the model was trained, and `encode_query` and `encode_document` give the training's vectors.

Classes and pooling go by the names that they had before 5.4, which newer versions take too: vLLM
(until its pull request 54533) and others know no other, and would silently pool in the way that is
usual for the architecture.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pixelrag.models import Embedder, Preprocessor

_POOLING = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
# The template of `pixelrag.models.template`, for a processor: instruction, user's turn, answer
# begun. Whatever template the base model brought, this is what was trained.
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' -}}
"""


def write_modules(folder: Path, embedder: Embedder, preprocessor: Preprocessor) -> None:
    """Write the library's files beside a model's, tokenizer and image processor included."""
    modules = ["Transformer", "Pooling", *(["Normalize"] if embedder.normalize else [])]
    names = [f"{i}_{kind}" if i else "" for i, kind in enumerate(modules)]
    for name in names[1:]:
        (folder / name).mkdir()
    _write(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": name, "type": f"sentence_transformers.models.{kind}"}
            for i, (name, kind) in enumerate(zip(names, modules, strict=True))
        ],
    )
    modes = {f"pooling_mode_{mode}": kind == embedder.pooling for kind, mode in _POOLING.items()}
    # In this order: an older vLLM takes the first that is true.
    pooling = {"word_embedding_dimension": embedder.embedding_dim, **modes, "include_prompt": True}
    _write(folder / "1_Pooling" / "config.json", pooling)
    if embedder.normalize:
        _write(folder / "2_Normalize" / "config.json", {})
    _write(folder / "sentence_bert_config.json", _transformer(preprocessor))
    instructions = {
        "query": preprocessor.query_instruction,
        "document": preprocessor.document_instruction,
    }
    _write(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "SentenceTransformer",
            "prompts": instructions,
            "default_prompt_name": None,
            "similarity_fn_name": "cosine" if embedder.normalize else "dot",
        },
    )
    if preprocessor.has_vision:
        (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")


def _transformer(preprocessor: Preprocessor) -> dict[str, Any]:
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    modalities: dict[str, dict[str, str]] = {"text": forward}
    if preprocessor.has_vision:
        modalities |= {"image": forward, "message": forward | {"format": "structured"}}
    return {
        "transformer_task": "feature-extraction",
        # Named, since a text model with a chat template would else be sent messages.
        "modality_config": modalities,
        "module_output_name": "token_embeddings",
        "query_length": preprocessor.query_max_length,
        "document_length": preprocessor.document_max_length,
    }


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
