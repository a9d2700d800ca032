"""What `mkdocs` does with the documents besides: they are written to be read in the repository too.

- README.md is the home page.
- A link to a file of the repository that is not a document leads to a page that shows the file.
- The sites of both languages are built by themselves; a link from one into the other is plain HTML.
- Drawings are set into the page, where they follow its colors.
- The notebook is shown as a page.
- After the build, every link and anchor of both sites has to lead somewhere.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS, CHINESE, HOME = ROOT / "docs", ROOT / "docs/zh", ROOT / "README.md"
NOTEBOOK = DOCS / "tutorial.ipynb"

_BOOSTS = {
    "howto": 3,
    "start.md": 2,
    "memory.md": 2,
    "survival.md": 2,
    "reference": 0.5,
    "floors": 0.2,
    "log.md": 0.1,
}
"""How much more a page counts in the search: those that a newcomer looks for come first."""

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml", "": "makefile"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in sorted((DOCS / "site").glob("*.[cj]s*")):
        files.append(File.generated(config, f"assets/{path.name}", content=_read(path)))
    if _is_chinese(config):
        return files
    files.append(File.generated(config, "index.md", content=_read(HOME)))
    if NOTEBOOK.exists():
        files.append(File.generated(config, "tutorial.md", content=_notebook(NOTEBOOK)))
    for path in _shown_files():
        text = _read(path) if path.suffix == ".md" else _listing(path)
        files.append(File.generated(config, _page_of(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = _origin(page.file.src_uri, config)
    part = page.file.src_uri.split("/")[0]
    page.meta["search"] = {"exclude": part == "source", "boost": _BOOSTS.get(part, 1)}
    text = markdown.replace("<!-- fragment -->\n", "")

    def changed(link: re.Match[str]) -> str:
        if link[1] and link[3].endswith(".svg"):
            return _drawing((here.parent / link[3]).resolve(), link[2])
        return _link(link, here, page.file.src_uri, config)

    return _outside_fences(text, lambda part: _LINK.sub(changed, part))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """The choice of the language leads to the same page, if it is there. The links in the head are left
    out: the theme would load a map of the site by them, which fails where the site is a folder."""
    name = page.file.src_uri
    if _is_chinese(config):
        name = _page_of(CHINESE / name).removeprefix("zh/")
        here, there = f"zh/{name}", name
    else:
        is_there = name == "index.md" or (CHINESE / name).exists()
        here, there = name, f"zh/{name if is_there else 'index.md'}"
    way = os.path.relpath(there, Path(here).parent).replace(os.sep, "/")
    language = "en" if _is_chinese(config) else "zh"
    link = rf'<a href="[^"]*" hreflang="{language}"'
    address = re.sub(r"\.md$", ".html", way)
    output = re.sub(link, f'<a href="{address}" hreflang="{language}"', output)
    return re.sub(r'\s*<link rel="alternate"[^>]*>', "", output)


def on_post_build(config: MkDocsConfig) -> None:
    if not _is_chinese(config):  # the other one goes into this one, and is built after it
        return
    broken = list(_broken_links(Path(config.site_dir).parent))
    if broken:
        raise PluginError("Links that lead nowhere:\n" + "\n".join(broken))


# ------------------------------------------------------------------------------------- addresses


def _is_chinese(config: MkDocsConfig) -> bool:
    return Path(config.docs_dir).resolve() == CHINESE


def _origin(src_uri: str, config: MkDocsConfig) -> Path:
    """The file of the repository that a page was made from."""
    if _is_chinese(config):
        return CHINESE / src_uri
    if src_uri == "index.md":
        return HOME
    if src_uri.startswith("source/"):
        path = ROOT / src_uri.removeprefix("source/")
        return path if path.exists() else path.with_suffix("")
    return DOCS / src_uri


def _page_of(path: Path) -> str:
    """The page of a file, from the root of the English site; of a Chinese one, below `zh/`."""
    if path == HOME:
        return "index.md"
    if path == CHINESE / "README.md":
        return "zh/index.md"
    if path.is_relative_to(DOCS):
        name = path.relative_to(DOCS).as_posix()
        return "tutorial.md" if path == NOTEBOOK else name
    name = f"source/{path.relative_to(ROOT).as_posix()}"
    return name if path.suffix == ".md" else f"{name}.md"


def _link(link: re.Match[str], here: Path, src_uri: str, config: MkDocsConfig) -> str:
    target, _, anchor = link[3].partition("#")
    if not target or re.match(r"[a-z]+:", target):
        return link[0]
    path = (here.parent / target).resolve()
    if path.is_dir():
        return link[2]
    page, after = _page_of(path), f"#{anchor}" if anchor else ""
    if _is_chinese(config):
        if path.is_relative_to(CHINESE):
            return link[0]
        src_uri = f"zh/{src_uri}"
    way = os.path.relpath(page, Path(src_uri).parent).replace(os.sep, "/")
    if link[1]:
        return f'<img src="{way}" alt="{link[2]}">'
    if _is_chinese(config) == page.startswith("zh/"):
        return f"[{link[2]}]({way}{after})"
    way = re.sub(r"(README)?\.md$", lambda m: f"{'index' if m[1] else ''}.html", way)
    return f'<a href="{way}{after}">{link[2]}</a>'


def _shown_files() -> list[Path]:
    """The files of the repository that documents link to, and those that these link to."""
    waiting = [HOME, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
    found: dict[Path, None] = {}
    while waiting:
        here = waiting.pop()
        if not (here == HOME or here.is_relative_to(DOCS)):
            found[here] = None
        if here.suffix != ".md":
            continue
        for link in _LINK.finditer(_FENCE.sub("", _read(here))):
            target = link[3].partition("#")[0]
            path = (here.parent / target).resolve()
            is_shown = path in found or path in waiting or path.is_relative_to(DOCS) or path == HOME
            if target and not re.match(r"[a-z]+:", target) and path.is_file() and not is_shown:
                waiting.append(path)
    return list(found)


# --------------------------------------------------------------------------------------- content


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def _listing(path: Path) -> str:
    language = _LANGUAGES.get(path.suffix, "text")
    name = path.relative_to(ROOT).as_posix()
    return f"# {name}\n\n````{language}\n{_read(path)}````\n"


def _drawing(path: Path, alt: str) -> str:
    """An SVG as part of the page: its colors are those of the page."""
    svg = re.sub(r"\n\s*", " ", _read(path))
    return f'\n<figure class="drawing" role="img" aria-label="{alt}">{svg}</figure>\n'


def _notebook(path: Path) -> str:
    parts = []
    for cell in json.loads(_read(path))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            text = output.get("text") or output.get("data", {}).get("text/plain", ())
            parts.append("```text\n" + "".join(text).rstrip() + "\n```")
    parts.append("[Download this notebook](tutorial.ipynb)")
    return "\n\n".join(parts)


# ----------------------------------------------------------------------------------------- links


class _Links(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("id", "name"):
                self.anchors.add(value)
            elif value and name in ("href", "src") and not re.match(r"(?:[a-z]+:|//|\$)", value):
                self.targets.append(value)


def _broken_links(site: Path) -> Iterator[str]:
    pages: dict[Path, _Links] = {}
    for path in site.rglob("*.html"):
        pages[path] = _Links()
        pages[path].feed(_read(path))
    for path, links in pages.items():
        if path.name == "404.html":  # its links are those of the root
            continue
        for target in links.targets:
            name, _, anchor = unquote(target).partition("#")
            there = (path.parent / name.partition("?")[0]).resolve() if name else path
            there = there / "index.html" if there.is_dir() else there
            is_top = anchor in ("", "__skip", "__codelineno")
            if not there.exists() or not (
                is_top or there not in pages or anchor in pages[there].anchors
            ):
                yield f"{path.relative_to(site)}: {target}"
