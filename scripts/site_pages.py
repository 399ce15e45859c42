"""Build the site.

    python scripts/site_pages.py [FOLDER]

Zensical makes the pages from files below ``docs/``, and this program makes what it does not: the API reference, from
the public names of the package, so that a new name has an entry without an edit; pages of CONTRIBUTING.md,
CHANGELOG.md and SECURITY.md, which stay where they are; pages of the notebooks; the result files that pages link to.
All of it is written below a temporary folder, where links that differ between the repository and the site are
rewritten.

The build is strict. Zensical fails on a broken link between pages, on an anchor that is not there and on a reference
to a name that does not exist. This program fails, beyond that, on a page that the navigation leaves out, and on a link
or an image of a built page that leads nowhere.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import notebooks
from docstring_roles import address

import gradwire

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "zensical.toml"

FOLDED = {"CONTRIBUTING.md": "contributing/index.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}
"""Files of the repository that are pages, by their paths there and in the site."""

DATA = "benchmarks/results/"
"""Files below it that pages link to are copied."""

FAMILIES = {
    "casts": "Casts",
    "ternary": "Ternary",
    "levels": "Levels",
    "natural": "Natural compression",
    "lattice": "Lattice",
    "signs": "Signs",
    "rotations": "Rotations",
    "sparse": "Sparse",
    "atoms": "Atoms",
    "low_rank": "Low rank",
    "sketches": "Sketches",
    "feedback": "Feedback",
    "wrappers": "Wrappers",
    "local_steps": "Local steps",
    "gossip": "Gossip",
    "learned": "Learned codes",
}
"""Titles of the families of methods, by the folder below ``gradwire.methods`` that holds one."""


def file_name(page: str) -> str:
    """Return the name of a page's file, here and below ``docs/methods``."""
    return f"{page.replace('_', '-')}.md"


SECTIONS = {
    "links": (
        "Attach and links",
        "Attach a method to a module or to a loop, simulate it, save and load its state.",
    ),
    "methods": ("Methods and specs", "What every method has, the specs that name one, and the method that chooses."),
    **{
        family: (
            title,
            f"How they work, and what was chosen where sources differ: [{title}](../methods/{file_name(family)}).",
        )
        for family, title in FAMILIES.items()
    },
    "graphs": ("Graphs", "Methods for the rows at the boundaries of a partitioned graph."),
    "publishing": ("Publishing weights", "How to: [Publishing weights](../publishing-weights.md)."),
    "integrations": ("Integrations", "Integrations with other libraries. Each is imported when it is asked for."),
    "optimizers": ("Optimizers", "Proximal steps: sparse or bounded weights."),
    "errors": ("Errors", "What is raised, and when. What to do then: [What can go wrong](../what-can-go-wrong.md)."),
}
"""Pages of the API reference: title and first line."""

CALCULATOR = "calculator.html"

LINK = re.compile(r"(?<!!)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def section(name: str) -> str:
    """Return the page of a public name of the package, by the module that defines it."""
    home = getattr(getattr(gradwire, name), "__module__", "")
    _, part, *inner = [*home.split("."), "", ""]
    if part == "methods" and inner[0] in FAMILIES:
        return inner[0]
    if part == "methods" or home == "gradwire.exchange.method":
        return "methods"
    if part in ("graphs", "errors"):
        return part
    return {"optim": "optimizers", "publish": "publishing"}.get(part, "links")


def public_names() -> dict[str, list[str]]:
    """Return the dotted names that each page documents; constants and modules are not among them."""
    pages: dict[str, list[str]] = {page: [] for page in SECTIONS}
    for name in sorted(gradwire.__all__, key=str.lower):
        if callable(getattr(gradwire, name)):
            pages[section(name)].append(f"gradwire.{name}")
    pages["integrations"] = [f"gradwire.integrations.{name}" for name in gradwire.integrations.__all__]
    return pages


def summary(name: str) -> str:
    """Return the first line of a public name's docstring, without roles."""
    found: Any = gradwire
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    first = (inspect.getdoc(found) or "").partition("\n")[0]
    plain = re.sub(r":[a-z]+:`~?([^`]*)`", r"`\1`", first).replace("|", "\\|")
    return plain.replace("::", ":")


def api_pages() -> dict[str, str]:
    """Return the API reference: Markdown by path."""
    names = public_names()
    lines = ["# API reference", "", f"Every public name of `gradwire` {gradwire.__version__}.", ""]
    pages = {}
    for page, (title, about) in SECTIONS.items():
        lines += [f"## [{title}]({file_name(page)})", "", about, "", "| name | what it is |", "|---|---|"]
        lines += [f"| [`{n.removeprefix('gradwire.')}`][{address(n)}] | {summary(n)} |" for n in names[page]]
        lines.append("")
        parts = [f"# {title}", "", about, ""]
        for name in names[page]:
            path = address(name)
            # What is documented by another name is linked to by its public one, too.
            parts += [f"[](){{#{name}}}", ""] if path != name else []
            parts += [f"::: {path}", ""]
        pages[f"api/{file_name(page)}"] = "\n".join(parts)
    return {"api/index.md": "\n".join(lines), **pages}


def repository_path(page: str, target: str) -> str | None:
    """Return a relative link's target as a path of the repository; None where it leads elsewhere."""
    if "://" in target or target.startswith(("/", "mailto:")):
        return None
    parts: list[str] = list(PurePosixPath(page).parent.parts)
    for part in PurePosixPath(target).parts:
        if part == "..":
            if not parts:
                return None
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def site_path(path: str) -> str | None:
    """Return where the site has a file of the repository; None where it has not."""
    if path in FOLDED:
        return FOLDED[path]
    if path.startswith(DATA):
        return f"data/{PurePosixPath(path).name}"
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def rewritten(markdown: str, page: str) -> str:
    """Return a page's text with the links that leave ``docs/`` in the repository turned into links of the site.

    Args:
        markdown: Its text.
        page: Its path in the site.
    """
    sources = {path: source for source, path in FOLDED.items()}
    origin = sources.get(page, f"docs/{page}")

    def rewrite(match: re.Match[str]) -> str:
        target = repository_path(origin, match[1])
        place = target and site_path(target)
        if target and target.endswith(".ipynb"):
            return f"]({match[1].removesuffix('.ipynb')}.md{match[2] or ''})"
        if not place or (origin.startswith("docs/") and target and target.startswith("docs/")):
            return match[0]
        up = "../" * (len(PurePosixPath(page).parts) - 1)
        return f"]({up}{place}{match[2] or ''})"

    return LINK.sub(rewrite, markdown)


def linked_data() -> set[str]:
    """Return the result files that pages link to, as paths of the repository."""
    pages = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / source for source in FOLDED)]
    targets = (
        repository_path(page.relative_to(ROOT).as_posix(), match[1])
        for page in pages
        for match in LINK.finditer(page.read_text())
    )
    return {target for target in targets if target and target.startswith(DATA)}


def write_pages(docs: Path) -> None:
    """Write everything that Zensical reads below a folder that does not exist yet."""
    shutil.copytree(ROOT / "docs", docs)
    for notebook in docs.rglob("*.ipynb"):
        notebook.with_suffix(".md").write_text(notebooks.markdown(notebook))
        notebook.unlink()
    for page in docs.rglob("*.md"):
        page.write_text(rewritten(page.read_text(), page.relative_to(docs).as_posix()))
    made = api_pages()
    made |= {path: rewritten((ROOT / source).read_text(), path) for source, path in FOLDED.items()}
    for path, text in made.items():
        (docs / path).parent.mkdir(parents=True, exist_ok=True)
        (docs / path).write_text(text)
    (docs / "data").mkdir()
    for target in sorted(linked_data()):
        shutil.copy(ROOT / target, docs / "data")


def add_calculator(site: Path) -> None:
    """Put the calculator's numbers and programs into its page, so that it works without a server."""
    page = site / CALCULATOR
    numbers = json.dumps(json.loads((ROOT / DATA / "pages" / "calculator.json").read_text()), separators=(",", ":"))
    scripts = "".join(f'<script src="assets/{name}.js"></script>' for name in ("model", "calculator"))
    added = f'<script type="application/json" id="calculator-data">{numbers}</script>{scripts}'
    html = page.read_text()
    if html.count("</body>") != 1:
        raise SystemExit(f"{CALCULATOR}: there is no single </body> to put the calculator before")
    page.write_text(html.replace("</body>", f"{added}</body>"))


class _Page(HTMLParser):
    """Collects where a page's links and images lead, and the anchors that it has."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if value and name in ("href", "src"):
                self.targets.append(value)
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)


def broken_links(site: Path) -> list[str]:
    """Return a line for each relative link or image of the built pages that leads nowhere."""
    pages = {path.resolve(): _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        # Its links are relative to the address that was not found.
        if path.name == "404.html":
            continue
        for target in sorted(set(page.targets)):
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            place = (path.parent / unquote(url.path)).resolve() if url.path else path
            place = place / "index.html" if place.is_dir() else place
            known = (
                place.exists()
                if place not in pages
                else not url.fragment or unquote(url.fragment) in pages[place].anchors
            )
            if not known:
                found.append(f"{path.relative_to(site.resolve())}: {target}")
    return found


def left_out(docs: Path, config: str) -> list[str]:
    """Return the pages that the navigation does not name."""
    named = set(re.findall(r'"([\w./-]+\.md)"', config.partition("nav = [")[2]))
    return sorted({page.relative_to(docs).as_posix() for page in docs.rglob("*.md")} - named)


def build(site: Path) -> None:
    """Build the site into a folder, which is emptied first."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_pages(work / "docs")
        shutil.copy(ROOT / CONFIG, work)
        # The configuration names both by relative paths.
        for folder in ("src", "scripts"):
            (work / folder).symlink_to(ROOT / folder)
        missing = left_out(work / "docs", (ROOT / CONFIG).read_text())
        if missing:
            raise SystemExit(f"{CONFIG}: nav leaves out {', '.join(missing)}")
        done = subprocess.run(
            [sys.executable, "-m", "zensical", "build", "--strict"],
            cwd=work,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        add_calculator(work / "site")
        broken = broken_links(work / "site")
        if broken:
            raise SystemExit("links that lead nowhere:\n" + "\n".join(broken))
        shutil.rmtree(site, ignore_errors=True)
        shutil.move(work / "site", site)


def main() -> None:
    """Build into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "site")
    build(parser.parse_args().folder.resolve())


if __name__ == "__main__":
    main()
