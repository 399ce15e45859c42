"""What each compiled driver is compiled from, as a digest that stands in the driver's own file.

Numba keeps compiled code on disk for as long as the file that holds the function stays as it is, whatever that function
calls. So every module with kept functions carries a ``DIGEST`` of all sources behind it, and changes when they do. Its
own source is one of them: if an update ends between Numba's writing of the index and of the code, the index names the
code of the version before.

Run as a program, this writes the digests anew (``make digests``).
"""

from __future__ import annotations

import ast
import hashlib
import re
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "src" / "gradwire" / "kernels"
PACKAGE = "gradwire.kernels"
_KEPT = re.compile(r"^@(kept\(|njit\(.*cache=True)", re.MULTILINE)
_LINE = re.compile(r'^DIGEST = "\w*"\n', re.MULTILINE)


def kept(kernels: Path = KERNELS) -> list[Path]:
    """Find the modules whose functions Numba keeps on disk."""
    return sorted(path for path in kernels.rglob("*.py") if _KEPT.search(path.read_text()))


def written(path: Path) -> str | None:
    """Read the digest that a module carries."""
    found = _LINE.search(path.read_text())
    return found.group().split('"')[1] if found else None


def digest(path: Path, kernels: Path = KERNELS) -> str:
    """Compute the digest of all that a module is compiled from, but for its own line."""
    reached, waiting = {path}, [path]
    while waiting:
        new = _named(waiting.pop(), kernels) - reached
        reached |= new
        waiting += new
    # Digests in other files follow from the rest: with them, an edit would take several rounds of writing.
    texts = [_LINE.sub("", source.read_text()) for source in sorted(reached)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _named(path: Path, kernels: Path) -> set[Path]:
    """Return the modules of the package that one imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    inside = {name[len(PACKAGE) + 1 :] for name in names if name.startswith(f"{PACKAGE}.")}
    files = {kernels / f"{name.replace('.', '/')}.py" for name in inside}
    return {file for file in files if file.is_file()}


def main() -> None:
    """Write the digest into every module that lacks it or carries another."""
    for path in kept():
        new = f'DIGEST = "{digest(path)}"\n'
        text = path.read_text()
        if not _LINE.search(text):
            raise SystemExit(f"{path.relative_to(KERNELS)}: give it a line {new!r}")
        if new not in text:
            path.write_text(_LINE.sub(new, text))
            print(path.relative_to(KERNELS))


if __name__ == "__main__":
    main()
