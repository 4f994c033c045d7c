"""Loading is quiet: no report, no bar, and afterwards everything speaks as before."""

import contextlib

import pytest
from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging as transformers_logging

from pixelrag.models.load import quiet


def spoken(capsys) -> str:
    """What bars and reports write now."""
    capsys.readouterr()
    for bar in (transformers_logging.tqdm, modeling_gguf_pytorch_utils.tqdm):
        assert list(bar([1, 2], desc="Converting and de-quantizing GGUF tensors...")) == [1, 2]
    transformers_logging.get_logger("transformers.test").warning("a weight is missing")
    return capsys.readouterr().err


@pytest.mark.parametrize("error", [None, ValueError])
def test_bars_and_reports_are_silent_within_and_only_there(capsys, error):
    transformers_logging.enable_progress_bar()
    own_bar = modeling_gguf_pytorch_utils.tqdm
    assert spoken(capsys).count("GGUF tensors...: 100%") == 2
    with contextlib.suppress(ValueError), quiet():
        with quiet():
            assert spoken(capsys) == ""
        assert spoken(capsys) == ""
        if error is not None:
            raise error
    assert spoken(capsys).count("GGUF tensors...: 100%") == 2
    assert transformers_logging.is_progress_bar_enabled()
    assert modeling_gguf_pytorch_utils.tqdm is own_bar


def test_bars_that_were_off_stay_off(capsys):
    transformers_logging.disable_progress_bar()
    try:
        with quiet():
            pass
        assert not transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.enable_progress_bar()
