"""The RAG job's configuration: what cannot stand together is refused, and said how to mend."""

import pytest

from pixelrag.config.base import dump, fingerprint, load
from pixelrag.config.jobs import job_of
from pixelrag.config.rag import RagConfig
from pixelrag.errors import ConfigError

REQUIRED = [
    "--question_encoder.name_or_path=q",
    "--generator.name_or_path=g",
    "--knowledge_base.source=kb",
    "--data.train=t.jsonl",
    "--optim.max_steps=3",
]
HELD_OUT = "--data.eval=e.jsonl"
OWN = "--document_encoder.name_or_path=d"

CONFLICTS = {
    "train": ["--train=question,question,document"],
    "name both of question and document or neither": ["--train=question"],
    "question_encoder.pooling": ["--document_encoder.pooling=cls"],
    "add document to train": ["--refresh.every_steps=5", "--train=generator"],
    "add document or question to train": ["--encoder_lora.enabled=true", "--train=generator"],
    "add generator to train": ["--generator_lora.enabled=true", "--train=question,document"],
    "add question or document to train": ["--loss.retriever=pdist", "--train=generator"],
    "set checkpoint.keep_best false": ["--checkpoint.keep_best=true"],
    "set encoder_lora.enabled true": ["--encoder_lora.vision=true"],
    "leaves nothing to marginalise": ["--loss.answer=fid"],
    "leave loss.retriever_weight out": ["--loss.retriever_weight=2"],
    "leave loss.reader_temperature out": [
        "--loss.reader_temperature=2",
        "--loss.retriever=emdr2",
    ],
    "0.01 to 1": ["--loss.temperature=3"],
    "give both or neither": ["--knowledge_base.split=words"],
    "share less than a passage holds": [
        "--knowledge_base.split=words",
        "--knowledge_base.length=8",
        "--knowledge_base.overlap=8",
    ],
    "take at least k": ["--retrieval.over_retrieve=2"],
    "one of eval/em": ["--checkpoint.best_metric=eval/loss"],
    "or eval.answers true": ["--eval.answers=false", HELD_OUT],
    "name held-out questions": ["--eval.fresh_index=true"],
    "name held-out questions in data.eval": ["--eval.every_steps=5"],
    "say how often": ["--refresh.max_staleness=5"],
    "Ray gives each actor a GPU": ["--refresh.workers=ray", "--refresh.devices=cpu,cuda:1"],
    "set refresh.workers ray or index.holders ray": ["--ray.address=head:6379"],
    "actors search on the CPU": ["--index.device=cuda", "--index.holders=ray"],
    "the GPU that it trains on": ["--index.device=cuda", "--engine.device=cpu"],
}
FINE = [
    ["--train=question", OWN],
    ["--train=generator", OWN],
    ["--train=generator"],
    ["--train=generator", "--loss.answer=fid", "--loss.retriever=pdist"],
    ["--train=question,document"],
    ["--document_encoder.pooling=cls", OWN],
    ["--refresh.every_steps=5", "--train=document", OWN],
    ["--encoder_lora.enabled=true", "--encoder_lora.vision=true"],
    ["--loss.answer=fid", "--loss.retriever=loop", "--loss.reader_temperature=2"],
    ["--loss.retriever=adist", "--loss.reader_temperature=0.1", "--loss.label_smoothing=0.1"],
    ["--loss.answer=fid", "--loss.retriever=adist"],
    ["--knowledge_base.split=tokens", "--knowledge_base.length=8", "--knowledge_base.overlap=7"],
    ["--eval.answers=false", "--checkpoint.best_metric=eval/recall@1", HELD_OUT],
    ["--refresh.workers=ray", "--refresh.devices=cuda", "--ray.address=10.0.0.1:6379"],
    ["--index.holders=ray", "--ray.address=head:6379"],
    ["--index.device=cuda"],
    ["--eval.fresh_index=true", "--eval.every_steps=5", HELD_OUT],
]


@pytest.mark.parametrize("remedy", CONFLICTS)
def test_conflicts_name_their_remedy(remedy: str):
    with pytest.raises(ConfigError) as caught:
        load(RagConfig, REQUIRED + CONFLICTS[remedy])
    assert remedy in str(caught.value)
    assert str(caught.value).startswith("1 problem")


@pytest.mark.parametrize("flags", FINE, ids=" ".join)
def test_what_can_stand_together_loads_and_comes_back(flags: list[str], tmp_path):
    config, _ = load(RagConfig, REQUIRED + flags)
    (tmp_path / "config.yaml").write_text(dump(config))
    again, _ = load(RagConfig, ["--config", str(tmp_path / "config.yaml")])
    assert again == config
    assert fingerprint(again) == fingerprint(config)


def test_everything_required_is_asked_for_at_once():
    with pytest.raises(ConfigError) as caught:
        load(RagConfig, [])
    for path in (
        "question_encoder.name_or_path",
        "generator.name_or_path",
        "knowledge_base.source",
        "data.train",
        "optim.max_steps",
    ):
        assert path in str(caught.value)


def test_the_job_is_told_by_its_sections():
    assert job_of(REQUIRED) == "rag"
    assert job_of(["--model.name_or_path=m", "--data.train=t"]) == "contrastive"


@pytest.mark.parametrize("text", ["{title}", "no place"])
def test_a_passage_template_shows_the_text(text: str):
    with pytest.raises(ConfigError, match=r"a text with \{text\} in it"):
        load(RagConfig, [*REQUIRED, f"--knowledge_base.template={text}"])
