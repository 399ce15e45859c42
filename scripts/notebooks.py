"""Run the notebooks of ``docs/notebooks`` without Jupyter, and turn them into pages.

    python scripts/notebooks.py docs/notebooks/*.ipynb

runs the cells of each notebook in order, in one process, and writes into the file what each printed and the value of
its last expression. The tests run them again and compare.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def cells(path: Path) -> list[Cell]:
    """Return a notebook's cells, each with its text as one string."""
    found = json.loads(path.read_text())["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in found]


def saved(cell: Cell) -> str:
    """Return what is saved of a cell's output."""
    return "".join(line for output in cell.get("outputs", []) for line in output["text"])


def execute(sources: list[str]) -> list[str]:
    """Run cells in this process, in one namespace; return what each printed, and the value of its last expression."""
    names: dict[str, Any] = {"__name__": "__main__"}
    told = []
    for number, source in enumerate(sources):
        tree = ast.parse(source)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, f"cell {number}", "exec"), names)
            value = None if last is None else eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
        told.append(printed.getvalue() + ("" if value is None else f"{value!r}\n"))
    return told


def run(path: Path) -> list[str]:
    """Run a notebook in a process and a folder of its own; return what its code cells told.

    Raises:
        RuntimeError: a cell failed; the message ends with its traceback.
    """
    sources = [cell["source"] for cell in cells(path) if cell["cell_type"] == "code"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, Path(__file__).resolve(), "--execute"],
            input=json.dumps(sources),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{path.name}: {done.stderr}")
    told: list[str] = json.loads(done.stdout)
    return told


def write(path: Path, told: list[str]) -> None:
    """Save what the code cells told in a notebook."""
    notebook = json.loads(path.read_text())
    for cell, text in zip((c for c in notebook["cells"] if c["cell_type"] == "code"), told, strict=True):
        lines = text.splitlines(keepends=True)
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": lines}] if text else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def markdown(path: Path) -> str:
    """Return a notebook as a page of the site."""
    parts = []
    for cell in cells(path):
        if cell["cell_type"] == "markdown":
            parts.append(cell["source"])
        else:
            parts.append(f"```python\n{cell['source']}\n```")
            parts += [f"```text\n{text.rstrip()}\n```"] if (text := saved(cell)) else []
    first, *rest = parts
    note = f"*This page is the notebook `docs/notebooks/{path.name}`. A test runs its cells.*"
    return "\n\n".join([first, note, *rest]) + "\n"


def main(words: list[str]) -> None:
    """Run the notebooks that the command line names, and save what they told."""
    if words == ["--execute"]:
        told = execute(json.load(sys.stdin))
        print(json.dumps(told))
        return
    for word in words:
        write(Path(word), run(Path(word)))


if __name__ == "__main__":
    main(sys.argv[1:])
