"""Settings of the documentation's website, which `make docs` builds with Sphinx and MyST."""

import os
import pathlib
import re
import typing

if typing.TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "bert_jax"
extensions = ["myst_parser"]
root_doc = "index"
html_theme = "furo"
html_title = "bert_jax"
myst_heading_anchors = 3
highlight_language = "text"
suppress_warnings = ["misc.highlighting_failure"]  # samples of JSON may have ...
smartquotes = False  # they would turn the -- of flags into dashes


def add_navigation(app: "Sphinx", page: str, source: list[str]) -> None:
    """Appends the navigation to the index: a table of contents for the links of each section."""
    if page != root_doc:
        return
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        pages = "\n".join(re.findall(r"\]\(([^):.]+)\.md\)", section))
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```\n"


def unlink_files(app: "Sphinx", page: str, source: list[str]) -> None:
    """Replaces links to files outside of docs/, which the website does not have, by their text."""
    docs = pathlib.Path(app.srcdir)

    def replace(match: re.Match[str]) -> str:
        target = os.path.normpath((docs / page).parent / match["path"])
        return match[0] if docs in pathlib.Path(target).parents else match["text"]

    source[0] = re.sub(r"\[(?P<text>[^]]*)\]\((?P<path>\.\./[^)]*)\)", replace, source[0])


def setup(app: "Sphinx") -> None:
    """Connects the functions above to the events of Sphinx."""
    app.connect("source-read", add_navigation)
    app.connect("source-read", unlink_files)
