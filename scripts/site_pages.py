"""Pages of the site that are no files of ``docs/``, and links that differ between the repository and the site.

MkDocs loads this module as a hook. It makes the API reference from the public names of the package, so that a new name
has an entry without an edit, takes CONTRIBUTING.md, CHANGELOG.md and SECURITY.md from where they are, and publishes
the result files that pages link to.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

from docstring_roles import address
from mkdocs.structure.files import File, Files

import gradwire

ROOT = Path(__file__).parent.parent

FOLDED = {"CONTRIBUTING.md": "contributing/index.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}
"""Files of the repository that are pages, by their paths there and in the site."""

DATA = "benchmarks/results/"
"""Files below it that pages link to are copied."""

SECTIONS = {
    "links": (
        "Attach and links",
        "Attach a method to a module or to a loop, simulate it, save and load what it keeps.",
    ),
    "compressors": ("Compressors", "Operators on one vector: what each worker sends of its gradient, and of the mean."),
    "algorithms": ("Algorithms", "Methods that remember something between steps, or act on parameters."),
    "wrappers": ("Wrappers", "Methods around methods, without a memory of their own."),
    "graphs": ("Graphs", "Methods for the rows at the boundaries of a partitioned graph."),
    "integrations": (
        "Integrations",
        "What joins gradwire with other libraries. Each is imported when it is asked for.",
    ),
    "optimizers": ("Optimizers", "Proximal steps: sparse or bounded weights."),
    "errors": ("Errors", "What is raised, and when. What to do then: [What can go wrong](../what-can-go-wrong.md)."),
}
"""Pages of the API reference: title and first line."""

CALCULATOR = "calculator.md"

LINK = re.compile(r"(?<!!)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def section(name: str) -> str:
    """Return the page of a public name of the package, by the subpackage that defines it."""
    home = getattr(getattr(gradwire, name), "__module__", "")
    part = home.split(".")[1] if "." in home else ""
    known = {"compressors", "algorithms", "wrappers", "graphs", "errors"}
    return part if part in known else "optimizers" if part == "optim" else "links"


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
        lines += [f"## [{title}]({page}.md)", "", about, "", "| name | what it is |", "|---|---|"]
        lines += [f"| [`{n.removeprefix('gradwire.')}`][{address(n)}] | {summary(n)} |" for n in names[page]]
        lines.append("")
        parts = [f"# {title}", "", about, ""]
        for name in names[page]:
            path = address(name)
            # What is documented by another name is linked to by its public one, too.
            parts += [f"[](){{#{name}}}", ""] if path != name else []
            parts += [f"::: {path}", ""]
        pages[f"api/{page}.md"] = "\n".join(parts)
    return {"api/index.md": "\n".join(lines), **pages}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and the data that pages link to."""
    for path, text in api_pages().items():
        files.append(File.generated(config, path, content=text))
    for source, path in FOLDED.items():
        files.append(File.generated(config, path, content=(ROOT / source).read_text()))
    linked = {
        target
        for page in [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / source for source in FOLDED)]
        for target in (
            repository_path(page.relative_to(ROOT).as_posix(), m[1]) for m in LINK.finditer(page.read_text())
        )
        if target and target.startswith(DATA)
    }
    for target in sorted(linked):
        files.append(File.generated(config, f"data/{PurePosixPath(target).name}", abs_src_path=str(ROOT / target)))
    return files


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


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn the links that leave ``docs/`` in the repository into links of the site."""
    here = page.file.src_uri
    sources = {path: source for source, path in FOLDED.items()}
    origin = sources.get(here, f"docs/{here}")

    def rewrite(match: re.Match[str]) -> str:
        target = repository_path(origin, match[1])
        place = target and site_path(target)
        if not place or (origin.startswith("docs/") and target and target.startswith("docs/")):
            return match[0]
        up = "../" * (len(PurePosixPath(here).parts) - 1)
        return f"]({up}{place}{match[2] or ''})"

    return LINK.sub(rewrite, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Give the calculator its numbers and its programs, so that the page works without a server."""
    if page.file.src_uri != CALCULATOR:
        return html
    numbers = json.dumps(json.loads((ROOT / DATA / "pages" / "calculator.json").read_text()), separators=(",", ":"))
    scripts = "".join(f'<script src="assets/{name}.js"></script>' for name in ("model", "calculator"))
    return f'{html}<script type="application/json" id="calculator-data">{numbers}</script>{scripts}'
