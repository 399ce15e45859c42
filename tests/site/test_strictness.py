"""What the build refuses: broken links and anchors, pages that the navigation leaves out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.repository,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="Zensical needs Python 3.11"),
]

PAGE = """
[project]
site_name = "small"
use_directory_urls = false
nav = [{ "Home" = "index.md" }, { "Other" = "other.md" }]

[project.plugins.mkdocstrings.handlers.python]
paths = ["src"]
"""


def built(folder: Path, text: str) -> tuple[int, str]:
    """Build two pages, the first with a text, and return the exit status and what was told."""
    (folder / "docs").mkdir()
    (folder / "docs" / "index.md").write_text(f"# Home\n\n{text}\n")
    (folder / "docs" / "other.md").write_text("# Other\n\n## A part\n\nWords.\n")
    (folder / "src").mkdir()
    (folder / "src" / "small.py").write_text('"""A module."""\n\ndef there() -> None:\n    """Do nothing."""\n')
    (folder / "zensical.toml").write_text(PAGE)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_good_links_pass(tmp_path: Path) -> None:
    code, told = built(tmp_path, "[a](other.md#a-part), [b][small.there]\n\n::: small.there")
    assert code == 0, told


@pytest.mark.parametrize(
    "text", ["[a](nowhere.md)", "[a](other.md#nowhere)", "[a](#nowhere)", "[a][small.nowhere]", "::: small.nowhere"]
)
def test_zensical_refuses(text: str, tmp_path: Path) -> None:
    code, told = built(tmp_path, text)
    assert code != 0, told


def test_links_and_images_of_built_pages_must_lead_somewhere(tmp_path: Path) -> None:
    from site_pages import broken_links

    (tmp_path / "folder").mkdir()
    (tmp_path / "data.json").write_text("{}")
    (tmp_path / "folder" / "other.html").write_text('<h2 id="part">A part</h2><a href="../index.html#top">up</a>')
    good = '<a id="top" href="folder/other.html#part"></a><a href="data.json"></a><a href="https://example.org"></a>'
    (tmp_path / "index.html").write_text(good)
    assert broken_links(tmp_path) == []
    bad = '<a href="folder/other.html#gone"></a><img src="figure.png"><a href="gone.json"></a><a href="#gone"></a>'
    (tmp_path / "index.html").write_text(bad)
    found = {
        "index.html: #gone",
        "index.html: figure.png",
        "index.html: folder/other.html#gone",
        "index.html: gone.json",
        "folder/other.html: ../index.html#top",
    }
    assert set(broken_links(tmp_path)) == found


def test_the_navigation_must_name_every_page(tmp_path: Path) -> None:
    from site_pages import left_out

    (tmp_path / "guide.md").touch()
    (tmp_path / "lost.md").touch()
    assert left_out(tmp_path, 'nav = [{ "Guide" = "guide.md" }]') == ["lost.md"]
