"""The house: which way imports point, what is complete, what is forbidden."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradwire
from cases import CASES
from gradwire.catalogue import METHODS
from gradwire.compressors import Compressor

PACKAGE = Path(gradwire.__file__).parent
ROOT = Path(__file__).parent.parent

LEAVES = {"errors", "seeds", "segments", "methods", "ops", "version"}
ALLOWED = {
    "errors": set(),
    "seeds": set(),
    "version": set(),
    "segments": set(),
    "ops": set(),
    "methods": {"errors"},
    "optim": {"errors"},
    "kernels": {"errors"},
    "wire": {"errors"},
    "compressors": LEAVES | {"kernels", "wire"},
    "catalogue": {"errors", "methods", "optim", "compressors", "algorithms"},
    "protocols": LEAVES | {"wire", "compressors"},
    "algorithms": LEAVES | {"optim", "kernels", "compressors", "protocols"},
    "groups": LEAVES | {"protocols", "algorithms"},
    "planning": LEAVES | {"kernels", "compressors", "algorithms", "groups", "catalogue"},
    "perf": LEAVES | {"kernels", "compressors", "algorithms", "groups", "catalogue", "planning"},
    "adapters": LEAVES
    | {"kernels", "compressors", "protocols", "algorithms", "groups", "catalogue", "planning", "perf"},
    "processes": set(),
    "lab": {"errors", "processes"},
    "__init__": {"adapters", "catalogue", "compressors", "errors", "groups", "methods", "optim", "planning", "version"},
    # Above the public interface: these build on `import gradwire` and leaves alone.
    "report": {"errors", "version"},
    "experiments": LEAVES | {"__init__", "report", "processes", "lab"},
    "bench": LEAVES
    | {"__init__", "experiments", "processes", "lab", "perf", "planning", "kernels", "groups", "catalogue"},
    "__main__": {"cli"},
    "cli": {"__init__", "errors", "experiments", "report", "version", "lab", "bench", "perf"},
}
FENCED = {
    "numba": {"kernels"},
    "llvmlite": {"kernels"},
    "triton": set(),
    "matplotlib": {"report"},
    "jinja2": {"report"},
    "typer": {"cli"},
    "rich": {"cli"},
    "sklearn": {"experiments"},
    "scipy": {"perf"},
    "torch.distributed": {"groups", "adapters", "experiments", "bench", "cli"},
}


def modules() -> Iterator[tuple[str, Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        part = relative.parts[0] if len(relative.parts) > 1 else relative.stem
        yield part, path, ast.parse(path.read_text())


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_point_one_way() -> None:
    wrong = []
    for part, path, tree in modules():
        for name in imported(tree):
            pieces = name.split(".")
            if pieces[0] != "gradwire":
                continue
            target = pieces[1] if len(pieces) > 1 else "__init__"
            if target not in ALLOWED:
                target = "__init__"
            if name == "gradwire" and part in ("adapters", "planning", "perf"):
                continue  # `from gradwire import catalogue`
            if target != part and target not in ALLOWED[part]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong


def test_third_parties_are_fenced() -> None:
    wrong = []
    for part, path, tree in modules():
        for name in imported(tree):
            for library, homes in FENCED.items():
                if (name == library or name.startswith(library + ".")) and part not in homes:
                    wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong


FORBIDDEN = {
    ("torch", "manual_seed"),
    ("torch", "seed"),
    ("random", "seed"),
    ("np.random", "seed"),
    ("torch", "bernoulli"),
}


def test_no_assert_and_no_global_generator_in_the_library() -> None:
    wrong = []
    for part, path, tree in modules():
        for node in ast.walk(tree):
            where = f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Assert):
                wrong.append(f"{where} asserts")
            if part in ("experiments", "bench", "cli") or not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            drawn = name in {f"{a}.{b}" for a, b in FORBIDDEN} or name.startswith(("np.random.", "random."))
            generated = name in {"torch.rand", "torch.randn", "torch.randint", "torch.randperm"}
            if drawn or (generated and not any(k.arg == "generator" for k in node.keywords)):
                wrong.append(f"{where} draws from a global generator: {name}")
    assert not wrong


def test_files_can_be_read_in_one_sitting() -> None:
    long = {str(p.relative_to(PACKAGE)): len(p.read_text().splitlines()) for _, p, _ in modules()}
    assert {name: lines for name, lines in long.items() if lines > 400} == {}


def test_every_method_is_in_the_tuple_the_cases_and_has_its_own_tag() -> None:
    found = set()
    for part, _, tree in modules():
        if part in ("compressors", "algorithms"):
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    named = [
                        n
                        for n in node.body
                        if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "name" and n.value
                    ]
                    found |= {ast.literal_eval(n.value) for n in named}  # type: ignore[arg-type]
    assert found == {kind.name for kind in METHODS} == set(CASES)
    tags = [kind.tag for kind in METHODS if issubclass(kind, Compressor)]
    assert len(tags) == len(set(tags))
    assert all(1 <= tag <= 126 for tag in tags)


@pytest.mark.repository
@pytest.mark.parametrize("page", ["README.md", "docs/methods.md"])
def test_every_method_has_a_row_in_the_docs(page: str) -> None:
    text = (ROOT / page).read_text()
    for kind in METHODS:
        assert f"| `{kind.name}` |" in text, f"{page} has no row for {kind.name}"


@pytest.mark.repository
def test_the_repository_names_no_machine() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    words = ["/ho" + "me/", "/ro" + "ot/", "/wo" + "rk/"]
    wrong = []
    for name in listed:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".json", ".txt", ".sh", ".j2", ""} and path.is_file():
            text = path.read_text(errors="replace")
            wrong += [f"{name}: {word}" for word in words if word in text]
    assert not wrong


def test_importing_is_cheap() -> None:
    """No optional library, no compiler, no process group comes with `import gradwire`."""
    code = (
        "import sys, gradwire, gradwire.kernels;"
        "bad = [m for m in ('numba', 'llvmlite', 'triton', 'matplotlib', 'sklearn', 'typer', 'rich', 'jinja2') "
        "if m in sys.modules]; print(bad); sys.exit(bool(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_public_names_exist_and_are_documented() -> None:
    for name in gradwire.__all__:
        value = getattr(gradwire, name)
        assert name.startswith("__") or value.__doc__, name
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.repository
def test_pages_are_those_of_the_committed_results() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "summarise.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
