"""`pixelrag eval --gallery`: what was found, gold marked, the worst queries first."""

import json
import re
from pathlib import Path

import pytest

from pixelrag.cli import main
from pixelrag.data.schema import Document
from pixelrag.evaluate import gallery
from pixelrag.evaluate.gallery import gallery_page, gallery_rows
from tests.train.material import command, merged

DOCUMENTS = {name: Document.of_text(f"text <{name}>") for name in "abcdefgh"}


def rows_of(**found: tuple[str, str]):
    """Rows by the names that were found, in order, and those that should be."""
    run = {query: [(name, 1.0 - i / 8) for i, name in enumerate(names)]
           for query, (names, _) in found.items()}  # fmt: skip
    qrels = {query: set(relevant) for query, (_, relevant) in found.items()}
    return gallery_rows(run, qrels, DOCUMENTS, {query: f"what is {query}?" for query in found})


def test_the_worst_come_first_and_what_was_missed_is_shown():
    rows = rows_of(good=("abcdef", "a"), bad=("abcdef", "h"), late=("abcdef", "f"))
    assert [row.sample_id for row in rows] == ["bad", "late", "good"]
    assert [row.rank for row in rows] == [None, 6, 1]
    assert [[hit.id for hit in row.missed] for row in rows] == [["h"], ["f"], []]
    assert [hit.gold for hit in rows[2].hits] == [True, False, False, False, False]
    page = gallery_page(rows, {"eval/mrr": 0.5}, title="t")
    assert page.index("what is bad?") < page.index("what is late?") < page.index("what is good?")
    assert "no relevant document among the first 6" in page
    assert "first relevant document at 6" in page
    assert page.count('<li class="gold">') == 3
    assert "text &lt;h&gt;" in page
    # What is right needs no look.
    assert page.count("<details open>") == 2


def test_a_long_gallery_is_cut_and_says_so(monkeypatch):
    monkeypatch.setattr(gallery, "_MAX_QUERIES", 2)
    page = gallery_page(rows_of(a=("ab", "a"), b=("ab", "b"), c=("ab", "a")), {}, title="t")
    assert "2 of 3 queries, the worst first" in page
    assert page.count("<details") == 2


def test_eval_writes_it_with_its_tiles(tmp_path: Path, base, shelf, capsys):
    """Seven held-out rows, five of pictures, searched among all their documents."""
    config = merged(
        base,
        {"model": {"name_or_path": str(shelf / "qwen3_vl")}},
        {"data": {"eval": str(shelf / "mixed_eval.jsonl")}, "output_dir": str(tmp_path / "run")},
    )
    out, page = tmp_path / "out.json", tmp_path / "gallery.html"
    flags = ["--output", str(out), "--gallery", str(page)]
    assert main([*command(tmp_path, config, "eval"), *flags]) == 0
    assert capsys.readouterr().out.endswith(f"\nwrote {out}\nwrote {page}\n")
    text = page.read_text()
    figures = json.loads(out.read_text())
    first = [int(rank) for rank in re.findall("first relevant document at (\\d+)<", text)]
    assert len(first) == 7
    assert first == sorted(first, reverse=True)
    assert sum(1 / rank for rank in first) / 7 == pytest.approx(figures["figures"]["eval/mrr"])
    assert text.count('href="data:image/webp;base64,') >= 5
    assert "a picture of tile 8" in text
    assert not re.search("""(src|href)=["'](?!data:|#tile-)""", text)


def test_it_is_for_retrievers(tmp_path, lesson, capsys):
    assert main([*command(tmp_path, lesson, "eval"), "--gallery", "x.html"]) == 2
    assert "--gallery: only for retrievers" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "asks"), [("gallery", "what"), ("samples", "x.htm")])
def test_a_page_ends_in_html(name, asks, tmp_path, base, capsys):
    config = merged(base, {"data": {"eval": "rows.jsonl"}, "output_dir": str(tmp_path / "run")})
    assert main([*command(tmp_path, config, "eval"), f"--{name}", asks]) == 2
    assert f"--{name}: got {asks}, expected a name that ends in .html" in capsys.readouterr().err
