"""`pixelrag validate`: every row of a job's data, checked without training."""

import sys

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.errors import DataError


def main(config: ContrastiveConfig) -> int:
    """Print each bad row by file, line and reason, then a summary; 3 where there are any.

    The configuration is checked before this is called. Raises `DataError` where a file as a whole
    cannot be read.
    """
    from pixelrag.data.pairs import check_files

    files = [*config.data.train, *config.data.eval]
    report = check_files(files)
    for bad in report.bad:
        sys.stdout.write(f"{bad.file}:{bad.line}: {bad.reason}\n")
    sys.stdout.write(
        f"{report.num_rows} rows and {report.num_documents} distinct documents in {len(files)} "
        f"file{'s' * (len(files) != 1)}: {len(report.bad)} bad\n"
    )
    return DataError.exit_code if report.bad else 0
