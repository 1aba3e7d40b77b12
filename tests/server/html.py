"""What a page says, and whether it is a sound one: read with html.parser, which repairs nothing."""

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "br", "hr", "img", "link", "input"}
LOADS = {"src", "href", "xlink:href", "action", "data", "poster", "srcset", "background"}


class Page(HTMLParser):
    """A page: its text, its elements in order, and what its tables say.

    Attributes:
        elements: name and attributes of each.
        tables: by caption, the texts of the cells of all rows.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._open: list[str] = []
        self._texts: list[str] = []
        self._caption, self._rows = "", [[""]]
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == [], f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"{tag}: an attribute twice"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self._caption, self._rows = "", []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, f"</{tag}> closes {self._open[-3:]}"
        self._open.pop()
        if tag == "table":
            self.tables[self._caption] = self._rows

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self._texts.append(data)
        if "caption" in self._open:
            self._caption += data
        elif {"td", "th"} & set(self._open):
            self._rows[-1][-1] += data

    @property
    def text(self) -> str:
        """All that can be read, with single spaces."""
        return " ".join(" ".join(self._texts).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of all elements of a name."""
        return [attributes for name, attributes in self.elements if name == tag]

    def pictures(self) -> dict[str, dict[str, str | None]]:
        """Return the pictures by their names."""
        return {(each["aria-labelledby"] or "").split("-title")[0]: each for each in self.all("svg")}

    def styled(self, style: str) -> Sequence[dict[str, str | None]]:
        """Return the attributes of all elements that have all these classes."""
        wanted = set(style.split())
        return [each for _, each in self.elements if wanted <= set((each.get("class") or "").split())]


def check_self_contained(path: Path) -> None:
    """Assert that a page loads nothing and runs nothing."""
    page, source = Page(path), path.read_text(encoding="utf-8")
    assert not {"script", "link", "iframe", "object", "embed", "img", "use", "base"} & {
        name for name, _ in page.elements
    }
    for name, attributes in page.elements:
        assert not LOADS & attributes.keys(), (name, attributes)
        assert not [key for key in attributes if key.startswith("on")], (name, attributes)
    assert not re.search(r"url\(|@import|https?://|javascript:", source)
    assert {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"} in (
        page.all("meta")
    )
