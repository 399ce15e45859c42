"""The ledger of claims: its rows, what is wrong with them, and which are old. ``claims/README.md`` has the fields."""

from __future__ import annotations

import ast
import datetime
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.lib.results import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "LEDGER",
    "OUTCOMES",
    "VERDICTS",
    "Claim",
    "faults",
    "figures_of",
    "own_text",
    "read",
    "rewrite",
    "section_digest",
    "state_of",
    "unledgered",
    "written_pages",
]

LEDGER = ROOT / "claims"
OUTCOMES = LEDGER / "outcomes.json"
VERDICTS = ("reproduced", "refuted", "open", "out of reach")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A row of the ledger, with the fields that ``claims/README.md`` explains."""

    file: str
    name: str
    claim: str
    source: str
    verdict: str
    methods: tuple[str, ...] = ()
    published: str = ""
    here: str = ""
    why: str = ""
    tests: tuple[str, ...] = ()
    command: str = ""
    result: str = ""
    minutes: float | None = None
    needs: tuple[str, ...] = ()
    date: datetime.date | None = None
    commit: str = ""
    depends: tuple[str, ...] = ()
    outcomes: tuple[str, ...] = ()
    state: str = ""
    old: bool = False
    pages: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()


def read(folder: Path = LEDGER) -> list[Claim]:
    """Read all rows, by file and in the order of each file.

    Raises:
        ValueError: a row has a field that no row has, or lacks one that every row has.
    """
    known = {f.name for f in fields(Claim)} - {"file"}
    found = []
    for path in sorted(folder.glob("*.toml")):
        for row in tomllib.loads(path.read_text()).get("claim", []):
            wrong = sorted(row.keys() - known)
            missing = sorted({"name", "claim", "source", "verdict"} - row.keys())
            if wrong or missing:
                raise ValueError(f"{path.name}: {row.get('name')}: unknown fields {wrong}, missing fields {missing}")
            given = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
            found.append(Claim(file=path.name, **given))
    return found


def faults(claims: Sequence[Claim], methods: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return what is wrong with each row, whether or not its code has changed.

    Args:
        methods: Names of all methods.
    """
    known, told = set(methods), []
    names = [claim.name for claim in claims]
    for claim in claims:
        wrong = [f"{field} {value!r}" for field, value in _broken(claim, known, root)]
        if names.count(claim.name) > 1:
            wrong.append("the name of two rows")
        told += [f"{claim.file}: {claim.name}: {text}" for text in wrong]
    return told


def _broken(claim: Claim, methods: set[str], root: Path) -> Iterable[tuple[str, Any]]:
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", claim.name):
        yield "name", claim.name
    if claim.verdict not in VERDICTS:
        yield "verdict", claim.verdict
    yield from (("methods", name) for name in claim.methods if name not in methods)
    if claim.verdict != "reproduced" and not claim.why:
        yield "why", claim.why
    if claim.tests and claim.command:
        yield "tests and command", claim.command
    if claim.verdict in ("reproduced", "refuted"):
        if not (claim.tests or claim.command):
            yield "neither tests nor command", ""
        if not claim.here:
            yield "here", claim.here
    yield from (("tests", test) for test in claim.tests if not _defined(test, root))
    if claim.command:
        if not (claim.depends or claim.outcomes):
            yield "neither depends nor outcomes", ""
        for field in ("minutes", "date", "commit", "state"):
            if not getattr(claim, field):
                yield field, getattr(claim, field)
    yield from (("depends", path) for path in claim.depends if not (root / path).exists())
    if claim.result and not (root / claim.result).is_file():
        yield "result", claim.result
    if bool(claim.pages) != bool(claim.figures):
        yield "pages without figures, or figures without pages", claim.figures
    for page in claim.pages:
        if not (root / page).is_file():
            yield "pages", page
    texts = [_text(root / page) for page in claim.pages if (root / page).is_file()]
    yield from (("figures", figure) for figure in claim.figures if not any(figure in text for text in texts))
    for section in claim.sections:
        where, _, digest = section.partition(" ")
        if section_digest(where, root) != digest:
            yield "sections: no such section, or its figures have changed:", section


@cache
def _text(path: Path) -> str:
    return " ".join(path.read_text().split())


def own_text(page: str, anchor: str) -> str:
    """Return a section's text up to the next heading of any level; empty if there is no such section."""
    parts = re.split(r"(?m)^(?=#+ )", page)
    return next((part for part in parts if _slug(part.partition("\n")[0].lstrip("# ")) == anchor), "")


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def section_digest(where: str, root: Path = ROOT) -> str:
    """Return a digest of the figures of a section, named as ``docs/coders.md#sizes``; empty if there is none."""
    page, _, anchor = where.partition("#")
    path = root / page
    text = own_text(path.read_text(), anchor) if path.is_file() else ""
    return hashlib.sha256("\n".join(figures_of(text)).encode()).hexdigest()[:8] if text else ""


@cache
def _functions(path: Path) -> frozenset[str]:
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))


def _defined(test: str, root: Path) -> bool:
    file, _, name = test.partition("::")
    path = root / file
    return path.is_file() and name.partition("[")[0] in _functions(path)


def state_of(claim: Claim, root: Path = ROOT, outcomes: Mapping[str, Any] | None = None) -> str:
    """Return a digest of what a row depends on: sources without comments and docstrings, and the specs' outcomes.

    Args:
        outcomes: What ``claims/outcomes.json`` holds; by default it is read.
    """
    stored = json.loads(OUTCOMES.read_text()) if outcomes is None else outcomes
    digest = hashlib.sha256()
    for path in claim.depends:
        digest.update(f"{path} {_source_digest(root / path)}\n".encode())
    for spec in claim.outcomes:
        digest.update(f"{spec} {json.dumps(stored.get(spec))}\n".encode())
    return digest.hexdigest()[:12]


@cache
def _source_digest(path: Path) -> str:
    digest = hashlib.sha256()
    files = sorted(p for p in path.rglob("*.py") if "__pycache__" not in p.parts) if path.is_dir() else [path]
    for file in files:
        name = file.relative_to(path).as_posix() if path.is_dir() else ""
        digest.update(f"{name}\n".encode())
        digest.update(_code(file.read_text()).encode() if file.suffix == ".py" else file.read_bytes())
    return digest.hexdigest()


def _code(text: str) -> str:
    """Return a module's syntax tree as text, without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [
                statement
                for statement in node.body
                if not (
                    isinstance(statement, ast.Expr)
                    and isinstance(statement.value, ast.Constant)
                    and isinstance(statement.value.value, str)
                )
            ]
    return ast.dump(tree)


def rewrite(path: Path, name: str, values: Mapping[str, Any]) -> None:
    """Set fields of one row in its file, and leave every other line as it is.

    Raises:
        ValueError: the file has no such row.
    """
    head, *parts = re.split(r"(?m)^(?=\[\[claim\]\]\n)", path.read_text())
    for i, part in enumerate(parts):
        if re.search(rf'(?m)^name = "{re.escape(name)}"$', part):
            for key, value in values.items():
                line = f"{key} = {_toml(value)}"
                part, count = re.subn(rf"(?m)^{key} = .*$", lambda _, line=line: line, part)
                if not count:
                    part = f"{part.rstrip()}\n{line}\n" + ("\n" if i + 1 < len(parts) else "")
            parts[i] = part
            path.write_text(head + "".join(parts))
            return
    raise ValueError(f"{path.name} has no row named {name!r}")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if isinstance(value, datetime.date) else json.dumps(value, ensure_ascii=False)


UNITS = (
    r"%|µs|us|ms|s|min|minutes?|hours?|h|[kKMGT]?i?B(?:/s)?|[kMG]bit/s|bits?|bytes|times|points?|memcpys?|"
    r"G elements/s|degrees"
)
FIGURE = re.compile(rf"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?: ?(?:{UNITS}))(?![\w/])|(?<![\w.,/-])\d+\.\d+(?![\w.])")
"""A number with a unit in which something is measured, or with a decimal point."""

MADE = re.compile(r"<!-- [\w -]+: begin -->.*?<!-- [\w -]+: end -->", re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`\n]*`|\$[^$\n]*\$|\]\([^)]*\)", re.DOTALL)

GENERATED = frozenset(
    f"docs/{name}.md"
    for name in (
        *("accuracy", "benchmarks", "claims", "gossip", "lgc", "local-steps", "measurements", "quantisers"),
        *("results", "trials", "two-level"),
    )
)
"""Pages that programs write as a whole. What they show is in a result, which is some row's ``result``."""

NO_FIGURES = frozenset({"docs/wire-format.md", "docs/patch-format.md", "docs/properties.md"})
"""Pages of definitions: what they count in bits and bytes is what tests hold the format to."""


def written_pages(root: Path = ROOT) -> list[str]:
    """Return the pages that people write and that may show figures."""
    found = [path.relative_to(root).as_posix() for path in sorted((root / "docs").rglob("*.md"))]
    return [
        "README.md",
        *(
            name
            for name in found
            if name not in GENERATED | NO_FIGURES and not name.startswith(("docs/contributing/", "docs/claims/"))
        ),
    ]


def figures_of(text: str) -> list[str]:
    """Return the figures of a page in their order, without code, links and what programs write between marks.

    Example:
        >>> figures_of("It takes 1.5 s, `3 s` of it in code, and 2 workers of version 2.13.0 save 20 %.")
        ['1.5 s', '20 %']
    """
    return FIGURE.findall(" ".join(CODE.sub(" ", MADE.sub(" ", text)).split()))


def unledgered(claims: Sequence[Claim], root: Path = ROOT) -> dict[str, list[str]]:
    """Return, by page, the figures that no row names for it."""
    found = {}
    for page in written_pages(root):
        text = (root / page).read_text()
        covered = [s.partition(" ")[0].partition("#") for claim in claims for s in claim.sections]
        for anchor in {anchor for name, _, anchor in covered if name == page}:
            text = text.replace(own_text(text, anchor), "")
        told = [figure for claim in claims if page in claim.pages for figure in claim.figures]
        named = {figure for phrase in told for figure in (phrase, *figures_of(phrase))}
        missing = [figure for figure in figures_of(text) if figure not in named]
        if missing:
            found[page] = missing
    return found
