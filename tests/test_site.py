"""The documentation site: it builds strictly, and a browser shows and finds what is in it."""

import functools
import http.server
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from browser import browser, needs_chromium

import jaxtrain

pytest.importorskip("zensical")
ROOT = Path(__file__).parent.parent


def build(root: Path, folder: Path) -> subprocess.CompletedProcess:
    words = [sys.executable, str(root / "docs" / "build_site.py"), str(folder)]
    return subprocess.run(words, cwd=root, capture_output=True, text=True)


# `make site`, which `.ci/run` runs before the tests, builds it too.
whole_site = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "site"
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site):
    """The site on the loopback interface."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    serve = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def tab():
    with browser() as opened:
        yield opened


@whole_site
def test_every_page_of_the_repository_is_a_page_of_the_site(site):
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("")
        shown = site / ("guide" if str(name) == "index" else name) / "index.html"
        assert shown.is_file(), page
        title = re.sub(r"[`*]", "", page.read_text().split("\n")[0].removeprefix("# "))
        assert title.split("(")[0].strip() in re.sub(r"<[^>]+>", "", shown.read_text()), page
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        page = (site / "notebooks" / notebook.stem / "index.html").read_text()
        pictures = list((site / "notebooks" / notebook.stem).glob("*.png"))
        assert len(pictures) == notebook.read_text().count('"image/png":')
        assert all(f"{picture.name}" in page for picture in pictures)
        assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)
    for name in jaxtrain.__all__:
        page = (site / "api" / name / "index.html").read_text()
        assert f'.{name}" class="doc doc-heading"' in page, name


@whole_site
def test_no_formula_is_left_as_text(site):
    for page in (site / "notebooks").rglob("index.html"):
        prose = re.sub(r"<(pre|code|script|math)\b.*?</\1>", "", page.read_text(), flags=re.S)
        assert not re.search(r"\$\$|\\(?:frac|sum|mathrm)", prose), page
        assert "<mtext>\\" not in page.read_text()


@pytest.mark.parametrize(
    ("page", "added", "said"),
    [
        pytest.param(
            "docs/data.md",
            "[gone](gone.md) [gone](planning.md#gone)",
            ("page does not exist", "anchor does not exist"),
            marks=whole_site,
        ),
        ("docs/data.md", r"$\nosuchcommand{x}$", ["docs/data.md: this formula has a command"]),
        ("docs/gone.md", "# Gone", ["docs/index.md does not list docs/gone.md"]),
    ],
)
def test_what_leads_nowhere_fails_the_build(page, added, said, tmp_path):
    root = tmp_path / "root"
    for name in ("docs", "benchmarks", "notebooks", "jaxtrain", ".github", "tests", "configs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, root / name)
    with (root / page).open("a") as file:
        file.write(f"\n{added}\n")
    done = build(root, tmp_path / "site")
    assert done.returncode == 1
    told = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    assert [words for words in said if words not in told] == []
    assert "Traceback" not in told
    assert not (tmp_path / "site").exists()


@whole_site
@needs_chromium
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_the_window_and_load_nothing_from_elsewhere(address, tab, width):
    pages = ["", "planning/", "getting_started/", "bindings/", "formulas/", "api/Trainer/"]
    pages += ["notebooks/3_tensor_sequence_context/", "benchmarks/RESULTS/"]
    for page in pages:
        tab.open(address + page, width=width)
        assert tab.overflow() <= 0, page
        assert tab.errors == [], page
        others = [url for url in tab.requests if not url.startswith((address, "data:", "blob:"))]
        assert others == [], page


@whole_site
@needs_chromium
def test_the_front_page_is_the_readme_in_light_and_dark(address, tab):
    tab.open(address)
    assert tab.text("h1")[0].startswith("jaxtrain")
    assert "Quickstart" in " ".join(tab.text("h2"))
    assert tab.run("document.querySelector('img[src*=quickstart]').naturalWidth") > 100
    assert tab.run("document.querySelectorAll('.md-typeset pre button, .md-code__button').length")
    background = "getComputedStyle(document.body).backgroundColor"
    light = tab.run(background)
    tab.open(address, dark=True)
    assert tab.run(background) != light


@whole_site
@needs_chromium
def test_the_search_finds_lora(address, tab):
    tab.open(address)
    tab.run("document.querySelector('.md-search__button').click()")
    # The dialog is in a shadow tree.
    roots = "[...document.querySelectorAll('*')].map(e => e.shadowRoot).filter(e => e)"
    tab.wait(f"{roots}.some(e => e.activeElement && e.activeElement.tagName == 'INPUT')")
    tab.type("LoRA")
    found = f"{roots}.flatMap(e => [...e.querySelectorAll('a')]).map(e => [e.href, e.innerText])"
    tab.wait(f"{found}.length > 3")
    results = tab.run(found)
    assert results[0][0].startswith(f"{address}finetuning/")
    assert "LoRA" in results[0][1]


@whole_site
@needs_chromium
def test_formulas_are_drawn(address, tab):
    tab.open(address + "notebooks/3_tensor_sequence_context/")
    sizes = tab.run(
        "[...document.querySelectorAll('div.formula math')].map(e => e.getBoundingClientRect())"
        ".map(r => [r.width, r.height])"
    )
    assert len(sizes) >= 3
    assert all(width > 40 and height > 15 for width, height in sizes)
    # A fraction or a matrix is higher than a line of text: it was laid out, not written out.
    assert max(height for _, height in sizes) > 40


@whole_site
@needs_chromium
def test_the_page_of_the_trainer_shows_its_methods(address, tab):
    tab.open(address + "api/Trainer/")
    assert "Trainer" in tab.text("h1")[0]
    headings = " ".join(tab.text("h2"))
    for method in ("train", "evaluate", "generate", "step", "lower"):
        assert method in headings.split()
    assert any("UserError" in text for text in tab.text("code"))
