"""Every row of a contrastive job's data, images opened."""

from pathlib import Path

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.console import say
from pixelrag.errors import DataError


def check(config: ContrastiveConfig) -> int:
    """Print each bad row by file, line and reason; return 3 where there are any.

    A file that cannot be read at all is reported like a bad row, and the others are still checked.
    Negatives beyond `data.num_hard_negatives` are not opened, as training does not open them.
    """
    from pixelrag.data.files import data_files
    from pixelrag.data.images import image_progress_bar
    from pixelrag.data.pairs import load_corpus
    from pixelrag.data.tile_questions import load_tile_set

    failed = False
    seen: list[tuple[bool, list[Path]]] = []
    named = [("train", path) for path in config.data.train]
    named += [("eval", path) for path in config.data.eval]
    named += [("text", path) for path in config.data.text]
    for part, path in named:
        try:
            files = data_files(path, part)
            of_text = part == "text"
            if (of_text, files) not in seen:
                failed |= _is_bad(config, path, files, of_text=of_text)
                seen.append((of_text, files))
        except DataError as error:
            failed = True
            say(str(error))
    corpus, miniv8 = config.eval.corpus, config.eval.miniv8
    roots = config.data.image_roots
    try:
        if corpus is not None:
            with image_progress_bar(f"Opening images of {corpus}") as progress:
                documents = load_corpus(corpus, progress, image_roots=roots)
            say(f"{corpus}: {len(documents)} distinct documents to search")
        if miniv8 is not None:
            with image_progress_bar(f"Opening tiles of {miniv8}") as progress:
                most = config.eval.max_questions
                tiles = load_tile_set(miniv8, most, progress, image_roots=roots)
            say(f"{miniv8}: {len(tiles.questions)} questions about {len(tiles.tiles)} tiles")
    except DataError as error:
        failed = True
        say(str(error))
    return DataError.exit_code if failed else 0


def _is_bad(config: ContrastiveConfig, path: str, files: list[Path], *, of_text: bool) -> bool:
    """Say what is wrong with the files of a path; whether training would refuse them.

    Rows ``of_text`` must not have an image, whatever `data.bad_rows` says.
    """
    from pixelrag.data.images import image_progress_bar
    from pixelrag.data.pairs import PairDataset, check_files, images_in_text

    options = {
        "num_hard_negatives": config.data.num_hard_negatives,
        "retrieved_negatives": config.data.retrieved_negatives,
        "image_roots": config.data.image_roots,
    }
    with image_progress_bar(f"Opening images of {path}") as progress:
        report = check_files(files, progress, **options)
    for bad in report.bad:
        say(f"{bad.file}:{bad.line}: {bad.reason}")
    usable = report.num_rows > report.num_bad_rows
    images: list[str] = []
    if of_text and usable:
        images = list(images_in_text(PairDataset(files, "skip", report=report, **options)))
    for fault in images:
        say(fault)
    say(
        f"{path}: {report.num_rows} rows, {report.num_documents} distinct documents, "
        f"{report.num_bad_rows} bad rows"
    )
    refused = bool(report.bad) and (config.data.bad_rows == "error" or not usable)
    return refused or bool(images)
