"""Adds pages to the site, as a hook of MkDocs.

They are the repository's Markdown files, a page for each proto file, and a page for each other file to which a document
links. The page of a file that is not Markdown has the file's path with ".md".
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pygments.lexers
import pygments.util
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from proto_page import proto_pages

LOG = logging.getLogger(f"mkdocs.hooks.{__name__}")  # MkDocs counts its warnings
LINK = re.compile(r"(?<=\]\()[^)\s#]+")
IMAGES = (".png", ".svg")
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
# Lines that GitHub and Python-Markdown read differently: parts of an item that are not indented by 4, and \| in code.
MISREAD = re.compile(
    r"^ {1,3}(?:[*+-] |\d+\. |\|).*|(?<=\n\n) {1,3}\S.*|.*`[^`\n]*\\\|.*", re.MULTILINE
)
# Lines of a page's text that GitHub reads as an item or a row.
UNREAD = re.compile(r"^(?:[*+-] |1\. |\|).*", re.MULTILINE)
PRE = re.compile(r"<pre.*?</pre>", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parents[2]
    pages = {f"proto/{path}.md": text for path, text in proto_pages(root / "proto").items()}
    sources: set[str] = set()
    for path in _markdown_files(root):
        text = (root / path).read_text()
        for found in MISREAD.findall(FENCED.sub("", text)):
            LOG.warning("%s: MkDocs reads this differently from GitHub: %s", path, found)
        pages[path], linked = _with_links_to_pages(text, root, os.path.dirname(path))
        sources |= linked
    _complete(config.nav, pages.keys())
    for path, text in sorted(pages.items()):
        files.append(File.generated(config, path, content=text))
    for path in sorted(sources):
        if path.endswith(IMAGES):
            files.append(File.generated(config, path, abs_src_path=str(root / path)))
        elif f"{path}.md" not in pages:
            page = _source_page(root, path)
            hidden = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, f"{path}.md", content=page, inclusion=hidden))
    return files


def on_page_content(html: str, page: Page, **_: object) -> None:
    for found in UNREAD.findall(PRE.sub("", html)):
        LOG.warning(
            "%s: MkDocs does not read this as an item or a row: %s", page.file.src_uri, found
        )


def _markdown_files(root: Path) -> list[str]:
    command = ["git", "ls-files", "-co", "--exclude-standard", "*.md", ":!deploy/site/pages"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    return listed.stdout.splitlines()


def _with_links_to_pages(text: str, root: Path, folder: str) -> tuple[str, set[str]]:
    """Returns a document whose links to files and folders lead to their pages, and the files that are not Markdown."""
    sources = set()

    def page(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(folder, link[0]))
        if (root / target).is_dir():
            return f"{link[0].rstrip('/')}/README.md"
        if target.endswith(".md") or not (root / target).is_file():
            return link[0]
        sources.add(target)
        return link[0] if target.endswith(IMAGES) else f"{link[0]}.md"

    return LINK.sub(page, text), sources


def _complete(nav: list[Any], pages: Iterable[str]) -> None:
    """Appends the pages that the navigation leaves out to its last part, by their first folder."""
    ((_, development),) = nav[-1].items()
    others = sorted(set(pages) - set(_paths(nav)))
    for folder, paths in itertools.groupby(others, key=lambda path: path.split("/")[0]):
        development.append({folder: list(paths)})


def _paths(nav: Any) -> Iterator[str]:
    """Yields the paths in a part of the navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _paths(part)


def _source_page(root: Path, path: str) -> str:
    try:
        language = pygments.lexers.get_lexer_for_filename(path).aliases[0]
    except pygments.util.ClassNotFound:
        language = "text"
    text = (root / path).read_text()
    return f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n``````{language}\n{text}``````\n"
