"""Notebooks as pages of the documentation site, with the outputs that are stored in them."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTEBOOKS = "notebooks"  # the folder; in the site a page that lists them
_ABOUT = "Each notebook is shown with the outputs that are stored in it. They run on CPUs too.\n"


def notebook_files(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield path in the repository, path in the site and content of notebooks and pictures."""
    entries = []
    for file in sorted(folder.glob("*.ipynb")):
        base = f"{NOTEBOOKS}/{file.stem}"
        pictures: list[bytes] = []
        cells = json.loads(file.read_text())["cells"]
        text = "\n\n".join(_cell(cell, file.stem, pictures) for cell in cells)
        yield f"{NOTEBOOKS}/{file.name}", f"{base}.md", text.encode()
        for number, picture in enumerate(pictures):
            yield f"{base}/{number}.png", f"{base}/{number}.png", picture
        title, _, rest = text.removeprefix("# ").partition("\n")
        paragraphs = [one for one in rest.split("\n\n") if one.strip() and one[0] not in "[\n"]
        entries.append(f"## [{title}]({NOTEBOOKS}/{file.name})\n\n{paragraphs[0].strip()}\n")
    page = "\n".join(["# Notebooks\n", _ABOUT, *entries])
    yield NOTEBOOKS, f"{NOTEBOOKS}/index.md", page.encode()


def _cell(cell: dict[str, Any], name: str, pictures: list[bytes]) -> str:
    """Return a cell as Markdown; its pictures are added to `pictures`."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        # A badge is loaded from elsewhere: its link stays.
        return re.sub(r"\[!\[([^\]]*)\]\(https?://[^)]*\)\]", r"[\1]", source)
    if cell["cell_type"] != "code":
        return ""
    parts = [f"````python\n{source}\n````"] if source.strip() else []
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            pictures.append(base64.b64decode("".join(data["image/png"])))
            parts.append(f"![Output of the cell above]({name}/{len(pictures) - 1}.png)")
        elif "text/markdown" in data:
            parts.append("".join(data["text/markdown"]))
        else:
            text = "".join(output.get("text", data.get("text/plain", [])))
            if text.strip():
                parts.append(f"````{{.text .output}}\n{text.rstrip()}\n````")
    return "\n\n".join(parts)
