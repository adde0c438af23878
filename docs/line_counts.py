"""Writes the line counts of the files into docs/design/tour.md; `make docs` runs it."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOUR = ROOT / "docs" / "design" / "tour.md"
STOP = r"(\]\(\.\./\.\./([\w/.]+)\), )(\d+)( lines)"


def main() -> None:
    def counted(stop: re.Match[str]) -> str:
        lines = len((ROOT / stop[2]).read_text().splitlines())
        return f"{stop[1]}{lines}{stop[4]}"

    TOUR.write_text(re.sub(STOP, counted, TOUR.read_text()))


if __name__ == "__main__":
    main()
