"""Builds the site: `make docs`. Every warning is an error."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

from pixelrag import __version__  # noqa: E402

project = "pixelrag"
author = "the pixelrag authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "options"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = "pixelrag"
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"show-inheritance": True}
autodoc_mock_imports = ["faiss"]
default_role = "code"  # docstrings write `name` for code
napoleon_use_ivar = True
napoleon_use_rtype = False
# Signatures name types of other projects, and of ours that are not public.
nitpick_ignore_regex = [(r"py:.*", r".*")]

# Links that lead out of docs/ work in the repository; on the site only their words are left.
_OUTWARD = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!concepts|guides|reference|launchers/)[^)]*\)")


def setup(app):
    app.connect("source-read", _without_outward_links)


def _without_outward_links(app, docname, source):
    def kept(match):
        target = match[0].rpartition("(")[2].rstrip(")").partition("#")[0]
        inside = (HERE / docname).parent.joinpath(target).resolve()
        return match[0] if inside.is_relative_to(HERE) else match[1]

    source[0] = _OUTWARD.sub(kept, source[0])
