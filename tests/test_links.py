"""README and docs: every link and anchor leads somewhere, every page can be reached."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]


def prose(page: Path) -> str:
    """A page without its code, in blocks or in a line: neither links nor headings are there."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "`code`", text)


def links(page: Path) -> list[str]:
    """Targets of links and pictures inside the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in targets if "://" not in target]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+?)\s*$", text, re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = sum(one == anchor or one.startswith(f"{anchor}-") for one in found)
        found.add(f"{anchor}-{number}" if anchor in found else anchor)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_anchors_lead_somewhere(page):
    for link in links(page):
        target, _, anchor = link.partition("#")
        there = page.parent / target if target else page
        assert there.exists(), link
        assert there.resolve().is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(there), f"{link}: {sorted(anchors(there))}"


def test_every_page_is_reached_from_the_readme():
    reached, new = set(), {ROOT / "README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in links(page)}
        new |= {target for target in targets if target.suffix == ".md"} - reached
    assert set(PAGES) - reached == set()


def test_every_picture_of_the_docs_is_shown():
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(page)}
    assert set((ROOT / "docs").glob("*.png")) - shown == set()


def test_anchors_are_those_of_github(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# `Mesh.dcn`: 2, of 3\n\n```\n# no heading\n```\n## A_b - [c](d.md)\n## A_b - c\n"
    )
    assert anchors(page) == {"meshdcn-2-of-3", "a_b---c", "a_b---c-1"}
