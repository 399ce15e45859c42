"""The built site: every public name has an entry, and nothing comes from another host."""

from __future__ import annotations

import importlib
import inspect
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import gradwire as gw

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[2]
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


def promised() -> set[str]:
    """Return the public names, and the public methods and properties that their classes define with a docstring."""
    found = set()
    for prefix, module in (("gradwire", gw), ("gradwire.integrations", gw.integrations)):
        for name in module.__all__:
            value = getattr(module, name)
            if name == "__version__" or inspect.ismodule(value):
                continue
            found.add(f"{prefix}.{name}")
            if inspect.isclass(value):
                own = {k: v for k, v in vars(value).items() if not k.startswith("_")}
                members = {k for k, v in own.items() if callable(v) or isinstance(v, (property, staticmethod))}
                found |= {f"{prefix}.{name}.{k}" for k in members if inspect.getdoc(own[k]) and own[k].__doc__}
    return found


def test_every_public_name_has_an_entry(site: Path) -> None:
    names = promised()
    assert len(names) > 150
    pages = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    assert [name for name in sorted(names) if f'id="{name}"' not in pages] == []
    assert "doc-symbol-module" not in pages, "a module stands where an object of the same name should"


def test_every_page_of_the_reference_has_an_entry(site: Path) -> None:
    pages = sorted((site / "api").glob("*.html"))
    assert len(pages) > 20
    empty = [page.name for page in pages if page.name != "index.html" and 'id="gradwire.' not in page.read_text()]
    assert empty == []


def test_docstrings_leave_no_markup_behind(site: Path) -> None:
    for page in (site / "api").glob("*.html"):
        text = re.sub(r"<pre.*?</pre>|<[^>]*>", "", page.read_text(), flags=re.DOTALL)
        assert re.findall(r":(?:class|func|meth|mod|attr):.{0,40}", text) == [], page.name
        assert re.findall(r"\S{0,20}::\s*$", text, re.MULTILINE) == [], page.name


class _Loads(HTMLParser):
    """Collects what a page makes a browser load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        value = dict(attributes).get(LOADED.get(tag, ""))
        if value:
            self.found.append(value)


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loads = _Loads()
        loads.feed(page.read_text())
        assert [url for url in loads.found if re.match(r"(https?:)?//", url)] == [], page.name
    for sheet in [*site.rglob("*.css")]:
        assert re.findall(r"url\((?:https?:)?//[^)]*\)", sheet.read_text()) == [], sheet.name


def test_links_of_pages_lead_to_files_of_the_repository() -> None:
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    broken = []
    for page in [*pages, *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", re.sub(r"`[^`\n]*`", "", text)):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


ON_GPUS = "Code for GPUs has run on one NVIDIA H200, which up to four ranks shared; it [has never run on several]("


def test_pages_that_name_the_state_of_gpus_say_the_same() -> None:
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]
    texts = {str(page.relative_to(ROOT)): " ".join(page.read_text().split()) for page in pages}
    named = [name for name, text in texts.items() if re.search(r"\]\([./\w-]*gpu\.md[)]", text)]
    assert len(named) >= 7
    assert [name for name in [*named, "docs/gpu.md"] if ON_GPUS not in texts[name]] == []
    other = r"(?:[Nn]obody|[Nn]othing|not yet|has not|have not|never)[^.|]{0,60}\bGPUs?\b"
    claims = {name: re.findall(other, text.replace(ON_GPUS, "")) for name, text in texts.items()}
    assert {name: found for name, found in claims.items() if found} == {}


def _exists(dotted: str) -> bool:
    """Return whether a dotted name is a module, or an attribute or field of one."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for name in parts[count:]:
            if not hasattr(found, name):
                return name in getattr(found, "__annotations__", {})
            found = getattr(found, name)
        return True
    return False


def test_dotted_names_on_pages_exist() -> None:
    missing = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"\b(?:gradwire|gw)(?:\.[A-Za-z_]\w*)+", page.read_text()):
            if not _exists(re.sub(r"^gw\b", "gradwire", name)):
                missing.append(f"{page.relative_to(ROOT)}: {name}")
    assert missing == []
