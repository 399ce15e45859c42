"""The notebooks run, and their cells tell what is saved in them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.repository

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
NUMBER = r"\d+(?:\.\d+)?"


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) == 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_tells_what_it_holds(path: Path) -> None:
    import notebooks

    held = [notebooks.saved(cell) for cell in notebooks.cells(path) if cell["cell_type"] == "code"]
    assert "".join(held).count("\n") >= 8
    told = notebooks.run(path)
    assert [re.sub(NUMBER, "#", text) for text in told] == [re.sub(NUMBER, "#", text) for text in held]
    numbers, its = ([float(n) for text in texts for n in re.findall(NUMBER, text)] for texts in (told, held))
    assert numbers == pytest.approx(its, rel=0.05)


def test_a_cell_that_fails_is_an_error(tmp_path: Path) -> None:
    import notebooks

    path = tmp_path / "broken.ipynb"
    cells = [{"cell_type": "code", "source": ["known = 1\n", "print(known)\n", "known + 1"], "outputs": []}]
    path.write_text(json.dumps({"cells": cells}))
    assert notebooks.run(path) == ["1\n2\n"]
    cells.append({"cell_type": "code", "source": ["unknown\n"], "outputs": []})
    path.write_text(json.dumps({"cells": cells}))
    with pytest.raises(RuntimeError, match=r"(?s)broken.ipynb.*NameError: name 'unknown' is not defined"):
        notebooks.run(path)


def test_a_page_has_the_cells_and_what_they_told(tmp_path: Path) -> None:
    import notebooks

    path = tmp_path / "small.ipynb"
    output = {"output_type": "stream", "name": "stdout", "text": ["2\n"]}
    cells = [
        {"cell_type": "markdown", "source": ["# Small\n", "\n", "Words."]},
        {"cell_type": "code", "source": ["1 + 1"], "outputs": [output]},
    ]
    path.write_text(json.dumps({"cells": cells}))
    page = notebooks.markdown(path)
    assert page.startswith("# Small\n\nWords.\n\n*This page is the notebook")
    assert page.endswith("```python\n1 + 1\n```\n\n```text\n2\n```\n")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_to_files(path: Path) -> None:
    import notebooks

    targets = re.findall(r"\]\(([^)\s#]+)", "".join(c["source"] for c in notebooks.cells(path)))
    assert [target for target in targets if "://" not in target and not (path.parent / target).exists()] == []
