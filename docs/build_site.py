"""Builds the documentation site: `python docs/build_site.py [FOLDER]`, by default into site/.

The pages stay as GitHub shows them. They are gathered in a folder together with the notebooks and
the pages of the API, with links that fit the site and formulas as MathML, and built there.
"""

import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from site_api import API_INDEX, api_pages, exports, interface_pages
from site_formulas import draw_formulas
from site_notebooks import NOTEBOOKS, notebook_files

ROOT = Path(__file__).parent.parent
GITHUB = "https://github.com/jaxtrain/jaxtrain"
INDEX = "docs/index.md"  # lists every page, in groups

# Pages of other folders, and the front page: the path in the repository -> the path in the site.
MOVED = {
    "README.md": "index.md",
    INDEX: "guide.md",
    "CHANGELOG.md": "changelog.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    ".github/SECURITY.md": "security.md",
}
RESULTS = "benchmarks/RESULTS.md"
_CODE = re.compile(r"(^ *(`{3,})[^\n]*\n.*?^ *\2 *$|`[^`\n]+`)", re.S | re.M)
_LEXERS = {"gin": "python"}  # bindings look like Python


def main(folder: Path) -> None:
    """Build the site into `folder`, which is replaced.

    Raises:
      SystemExit: a link, an anchor or a page of the navigation is missing, a page is not listed, or
        a docstring names a parameter that its function does not have.
    """
    with tempfile.TemporaryDirectory() as name:
        stage = Path(name)
        where = gather(stage / "docs")
        settings = (
            (ROOT / "docs" / "site.yml").read_text().replace("[PATHS]", json.dumps([str(ROOT)]))
        )
        (stage / "mkdocs.yml").write_text(f"{settings}nav: {json.dumps(navigation(where))}\n")
        words = [sys.executable, "-m", "zensical", "build", "--strict"]
        done = subprocess.run(words, cwd=stage, capture_output=True, text=True)
        # The messages come before a traceback of the abort.
        said = done.stdout + done.stderr.partition("Traceback")[0]
        if done.returncode or "griffe:" in said:
            sys.exit(said)
        (stage / "site" / ".nojekyll").touch()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.move(stage / "site", folder)


def gather(folder: Path) -> dict[str, str]:
    """Write all pages and pictures; return the path in the site of each path in the repository."""
    docs = [path for path in sorted((ROOT / "docs").rglob("*")) if path.is_file()]
    kept = [path for path in docs if path.suffix in (".md", ".png", ".svg", ".css")]
    pages = {str(path.relative_to(ROOT)): str(path.relative_to(ROOT / "docs")) for path in kept}
    results = sorted((ROOT / "benchmarks").rglob("*.md"))
    where = pages | {str(path.relative_to(ROOT)): str(path.relative_to(ROOT)) for path in results}
    where |= MOVED
    content: dict[str, bytes] = {}
    texts = {path: uri for path, uri in where.items() if uri.endswith(".md")}
    for path, uri in where.items():
        content[uri] = (ROOT / path).read_bytes()
    for path, uri, data in notebook_files(ROOT / "notebooks"):
        where[path] = uri
        content[uri] = data
        if uri.endswith(".md"):
            texts[path] = uri
    for path, uri in texts.items():
        content[uri] = adapt(content[uri].decode(), path, where).encode()
    content |= {uri: text.encode() for uri, text in api_pages(ROOT).items()}
    for uri, data in content.items():
        (folder / uri).parent.mkdir(parents=True, exist_ok=True)
        (folder / uri).write_bytes(data)
    return where


# -- text -----------------------------------------------------------------------------------------


def adapt(text: str, source: str, where: dict[str, str]) -> str:
    """Return a page for the site: its links, formulas and the first lines of its code blocks."""
    text = outside_code(text, lambda part: draw_formulas(lead(part, source, where), source))
    return re.sub(r"^( *`{3,})(\w+)(?: file=(\S+))? *$", _fence, text, flags=re.M)


def _fence(match: re.Match[str]) -> str:
    ticks, language, file = match.groups()
    title = f' title="{file}"' if file else ""
    return f"{ticks}{_LEXERS.get(language, language)}{title}"


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Change what is in no block and no span of code."""
    parts, end = [], 0
    for match in _CODE.finditer(text):
        parts += [change(text[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*parts, change(text[end:])])


def lead(text: str, source: str, where: dict[str, str]) -> str:
    """Make links lead to pages of the site, and to GitHub for files that are none."""
    folder = posixpath.dirname(where[source]) or "."

    def follow(match: re.Match[str]) -> str:
        target, hash_, anchor = match[1].partition("#")
        path = target.removeprefix(f"{GITHUB}/blob/main/")
        if path == target:
            if not target or ":" in target:
                return match[0]
            path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path in where:
            return f"]({posixpath.relpath(where[path], folder)}{hash_}{anchor})"
        if not (ROOT / path).exists():
            return match[0]  # the build says where it is
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({GITHUB}/{kind}/main/{path}{hash_}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", follow, text)


# -- navigation -----------------------------------------------------------------------------------


def navigation(where: dict[str, str]) -> list[Any]:
    """Return the groups of the index, in its order, with the notebooks, results and API in them.

    Raises:
      SystemExit: a page is not listed.
    """
    found: list[Any] = [{"jaxtrain": where["README.md"]}, {"All pages": where[INDEX]}]
    listed = {"README.md", INDEX}
    text = (ROOT / INDEX).read_text()
    for group, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.S | re.M):
        entries: list[Any] = []
        for title, target in re.findall(r"\[([^\]]+)\]\(([^)#]+)\)", body):
            path = posixpath.normpath(posixpath.join("docs", target))
            if path not in where or path in listed:
                continue
            listed.add(path)
            inside = []
            if path in (NOTEBOOKS, RESULTS):
                inside = [one for one in where if one.startswith(f"{path.split('/')[0]}/")]
                inside = [one for one in inside if where[one].endswith(".md") and one != path]
                listed |= set(inside)
            uri = where[path]
            entries.append({title: [uri, *(where[one] for one in inside)] if inside else uri})
        found.append({group: entries})
    pages = {path for path, uri in where.items() if uri.endswith(".md")}
    if missing := sorted(pages - listed):
        sys.exit(f"{INDEX} does not list {', '.join(missing)}")
    names = [{name: f"api/{name}.md"} for name in exports(ROOT)]
    own = [{title: uri} for title, uri in interface_pages().items()]
    return [*found, {"API reference": [API_INDEX, *names, {"Interfaces": own}]}]


if __name__ == "__main__":
    # Not a name of the shell's, such as one that a linked page could carry into the build.
    os.environ.pop("MKDOCS_CONFIG_FILE", None)
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site")
