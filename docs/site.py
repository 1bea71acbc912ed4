"""What mkdocs adds to the pages in docs/: documents of the root, references that are generated, and links.

A page that is generated is no file in the tree, so it cannot be out of date. `make docs` builds the site.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

ROOT = Path(__file__).parents[1]
# Documents whose place is elsewhere in the tree: the page, and the file that it is.
INCLUDED = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "operating/security.md": "SECURITY.md",
    "benchmarks/results.md": "benchmarks/RESULTS.md",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]`]|`[^`]*`)*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]+)?\)")


def slug(title: str, separator: str = "-") -> str:
    """GitHub's anchor of a heading, so that links work in both places."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)


def source_of(page: str) -> str:
    """The file, from the root of the tree, whose text a page has."""
    return INCLUDED.get(page, f"docs/{page}")


def with_links_of_the_site(text: str, page: str) -> str:
    """A document with its links as they are in the site. A link to a file that is no page becomes text."""
    pages = {file: name for name, file in INCLUDED.items()}
    base = PurePosixPath(source_of(page)).parent

    def rewritten(match: re.Match[str]) -> str:
        image, label, path, anchor = match.groups()
        target = normpath(str(base / path))
        inside = pages.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
        if inside is None:
            return str(label)
        start = str(PurePosixPath(page).parent)
        return f"{image}[{label}]({relpath(inside, start)}{anchor or ''})"

    return _LINK.sub(rewritten, text)


def on_files(files, config):  # type: ignore[no-untyped-def]  # mkdocs calls it; it is not installed everywhere
    from mkdocs.structure.files import File

    from docs import references

    for page, file in INCLUDED.items():
        files.append(File.generated(config, page, content=(ROOT / file).read_text(encoding="utf-8")))
    for page, made in references.PAGES.items():
        files.append(File.generated(config, page, content=made()))
    return files


def on_page_markdown(markdown, page, config, files):  # type: ignore[no-untyped-def]
    from docs import references

    markdown = markdown.replace("<!-- families -->", references.families())
    return with_links_of_the_site(markdown, page.file.src_uri)
