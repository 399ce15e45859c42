"""The house in figures: files, lines, rooms, arrows and floors.

    python tests/house.py [--deep] [PACKAGE]

PACKAGE is a folder of Python modules, ours by default; another version's can be given. A room is a folder or a module
in the package's own folder, or with ``--deep`` every folder with modules. An arrow leads from a room to another one
that one of its modules imports, whenever it does. Rooms that lead to each other stand on one floor; every other room
stands above all that it imports.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

TOOLS = ("tools", "experiments", "bench", "lab", "report", "cli", "forking", "processes")
"""What is built on ``import gradwire``, by the names that it has had."""


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(package: Path, pieces: list[str], deep: bool) -> str:
    """Return the room of a module that is named by its pieces, without the package's own name."""
    if not deep:
        return pieces[0] if pieces else "__init__"
    place = package.joinpath(*pieces)
    folder = place if place.is_dir() else place.parent
    inside = folder.relative_to(package)
    return "/".join(inside.parts) or (pieces[0] if pieces else "__init__")


def arrows(package: Path, *, deep: bool = False) -> dict[str, set[str]]:
    """Return the rooms that each room imports from."""
    found: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        own = list(path.relative_to(package).with_suffix("").parts)
        room = room_of(package, own[:-1] if own[-1] == "__init__" else own, deep)
        for name in imported(ast.parse(path.read_text())):
            first, *pieces = name.split(".")
            if first != package.name:
                continue
            while pieces and not (
                package.joinpath(*pieces).with_suffix(".py").is_file() or package.joinpath(*pieces).is_dir()
            ):
                pieces.pop()
            target = room_of(package, pieces, deep)
            found.setdefault(room, set())
            if target != room:
                found[room].add(target)
                found.setdefault(target, set())
    return found


def floors(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """Return the floor of each room, from 0 on."""
    reach: dict[str, set[str]] = {}
    for room in graph:
        seen, left = set[str](), [room]
        while left:
            for following in graph[left.pop()]:
                if following not in seen:
                    seen.add(following)
                    left.append(following)
        reach[room] = seen
    floor: dict[str, int] = {}

    def height(room: str) -> int:
        if room not in floor:
            alike = {other for other in reach[room] if room in reach[other]}
            below = set().union(*(graph[one] for one in {room, *alike})) - alike - {room}
            floor.update(dict.fromkeys({room, *alike}, 1 + max((height(one) for one in below), default=-1)))
        return floor[room]

    for room in graph:
        height(room)
    return floor


def main() -> int:
    """Print the figures, and the rooms floor by floor."""
    given = [word for word in sys.argv[1:] if word != "--deep"]
    package = Path(given[0]) if given else Path(__file__).parent.parent / "src" / "gradwire"
    lines = {path: len(path.read_text().splitlines()) for path in package.rglob("*.py")}
    library = {p: n for p, n in lines.items() if p.relative_to(package).parts[0].removesuffix(".py") not in TOOLS}
    graph = arrows(package, deep="--deep" in sys.argv)
    levels = floors(graph)
    print(f"files {len(lines)}, lines {sum(lines.values())}, of these the library's {sum(library.values())}")
    print(f"rooms {len(graph)}, arrows {sum(map(len, graph.values()))}, floors {1 + max(levels.values())}")
    for number in sorted(set(levels.values()), reverse=True):
        print(f"{number:3}  {', '.join(sorted(room for room in levels if levels[room] == number))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
