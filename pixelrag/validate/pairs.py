"""Every row of a contrastive job's data, images opened."""

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.console import say
from pixelrag.errors import DataError


def check(config: ContrastiveConfig) -> int:
    """Print each bad row by file, line and reason; return 3 where there are any.

    A file that cannot be read at all is reported like a bad row, and the others are still checked.
    Negatives beyond `data.num_hard_negatives` are not opened, as training does not open them.
    """
    from pixelrag.data.images import image_progress_bar
    from pixelrag.data.pairs import check_files, load_corpus

    failed = False
    for path in dict.fromkeys([*config.data.train, *config.data.eval]):
        try:
            with image_progress_bar(f"Opening images of {path}") as progress:
                report = check_files(
                    [path], progress, num_hard_negatives=config.data.num_hard_negatives
                )
        except DataError as error:
            failed = True
            say(str(error))
            continue
        for bad in report.bad:
            say(f"{bad.file}:{bad.line}: {bad.reason}")
        usable = report.num_rows > report.num_bad_rows
        failed |= bool(report.bad) and (config.data.bad_rows == "error" or not usable)
        say(
            f"{path}: {report.num_rows} rows, {report.num_documents} distinct documents, "
            f"{report.num_bad_rows} bad rows"
        )
    corpus = config.eval.corpus
    if corpus is not None:
        try:
            with image_progress_bar(f"Opening images of {corpus}") as progress:
                documents = load_corpus(corpus, progress)
            say(f"{corpus}: {len(documents)} distinct documents to search")
        except DataError as error:
            failed = True
            say(str(error))
    return DataError.exit_code if failed else 0
