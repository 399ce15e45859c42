"""The house: which way imports point, what is complete, what is forbidden."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import gradwire
from cases import CASES
from gradwire.exchange.compressor import Compressor
from gradwire.methods.registry import METHODS

PACKAGE = Path(gradwire.__file__).parent
ROOT = Path(__file__).parent.parent

LEAVES = {
    "errors",
    "seeds",
    "version",
    *(
        f"exchange.{name}"
        for name in (
            "deferred_checks",
            "digests",
            "fields",
            "network_cost",
            "norms",
            "ops",
            "pace",
            "segments",
            "steps_locally",
            "traits",
        )
    ),
}
EXCHANGED = LEAVES | {"kernels", "exchange.wire", "exchange.codecs", "exchange.protocols"}
METHODS_OF = EXCHANGED | {"optim", "exchange.method", "exchange.compressor"}
LAYERS = {
    "errors": set(),
    "seeds": set(),
    "version": set(),
    "exchange.deferred_checks": set(),
    "exchange.digests": {"errors"},
    "exchange.fields": {"errors"},
    "exchange.network_cost": {"errors"},
    "exchange.norms": set(),
    "exchange.ops": set(),
    "exchange.pace": set(),
    "exchange.segments": set(),
    "exchange.steps_locally": set(),
    "exchange.traits": {"errors", "exchange.fields"},
    "optim": {"errors"},
    "kernels": {"errors"},
    "exchange.wire": {"errors", "exchange.deferred_checks", "kernels"},
    "exchange.codecs": LEAVES | {"kernels", "exchange.wire"},
    "exchange.protocols": LEAVES | {"kernels", "exchange.wire", "exchange.codecs"},
    "exchange.method": LEAVES | {"kernels", "exchange.codecs", "exchange.protocols"},
    "exchange.compressor": EXCHANGED | {"exchange.method"},
    "exchange.drivers": LEAVES | {"exchange.wire", "exchange.protocols"},
    "methods": METHODS_OF,
    "methods.registry": {"exchange.method", "methods"},
    "methods.spec": LEAVES | {"optim", "exchange.method", "methods", "methods.registry"},
    "methods.accuracy": {"methods.spec"},
    "methods.auto": LEAVES | {"exchange.method", "exchange.protocols", "methods", "methods.accuracy", "methods.spec"},
    "graphs": METHODS_OF | {"methods", "methods.spec"},
    "exchange.planning": LEAVES | {"kernels", "exchange.drivers", "exchange.method", "exchange.protocols"},
    "model": LEAVES | {"exchange.drivers", "exchange.method", "exchange.planning", "methods.auto", "methods.spec"},
    "link": METHODS_OF
    | {
        "exchange.drivers",
        "exchange.planning",
        "graphs",
        "methods",
        "methods.accuracy",
        "methods.auto",
        "methods.spec",
        "model",
    },
    "link.adapters": LEAVES | {"exchange.method", "exchange.planning", "link"},
    # Beside its own exact code, it rounds differences by any operator.
    "publish": {"errors", "kernels", "exchange.method", "methods", "methods.spec"},
    "integrations": {"errors", "exchange.method", "link", "link.adapters", "methods.spec"},
    "interface": {
        "errors",
        "exchange.drivers",
        "exchange.method",
        "exchange.network_cost",
        "exchange.traits",
        "graphs",
        "integrations",
        "link.adapters",
        "methods.auto",
        "methods.registry",
        "methods.spec",
        "optim",
        "publish",
        "version",
    },
    # Loads the interface at the first use of a name; type checkers see where names are from.
    "__init__": {"interface", "link.adapters", "methods.registry", "version"},
    # Above the public interface: these build on `import gradwire`, and on a few parts of the library by name.
    "tools.processes": {"errors"},
    "tools.lab": {"errors", "tools.processes"},
    "tools.report": {"errors"},
    "tools.experiments": LEAVES
    | {"__init__", "exchange.drivers", "graphs", "tools.lab", "tools.processes", "tools.report"},
    "tools.bench": LEAVES
    | {
        "__init__",
        "exchange.drivers",
        "exchange.planning",
        "kernels",
        "methods.registry",
        "model",
        "tools.experiments",
        "tools.lab",
        "tools.processes",
    },
    "tools.cli": {
        "__init__",
        "errors",
        "methods.accuracy",
        "model",
        "publish",
        "tools.bench",
        "tools.experiments",
        "tools.lab",
        "tools.processes",
        "tools.report",
    },
    "__main__": {"tools.cli"},
}
"""What each part may import: a part stands below all that import it."""

FENCED = {
    # The lab's relay is a loop over system calls, not a kernel.
    "numba": {"kernels", "tools.lab"},
    "llvmlite": {"kernels"},
    "triton": {"kernels"},
    "matplotlib": {"tools.report"},
    "jinja2": {"tools.report"},
    "typer": {"tools.cli"},
    "rich": {"tools.cli"},
    "sklearn": {"tools.experiments"},
    "scipy": {"model"},
    "fsspec": {"publish"},
    "tensorboard": {"integrations"},
    "wandb": {"integrations"},
    "mlflow": {"integrations"},
    "prometheus_client": {"integrations"},
    "accelerate": {"integrations"},
    "transformers": {"integrations"},
    "lightning": {"integrations"},
    "torch.distributed": {
        "exchange.drivers",
        "link",
        "link.adapters",
        "publish",
        "tools.bench",
        "tools.cli",
        "tools.experiments",
    },
}


@cache
def modules() -> list[tuple[str, Path, ast.Module]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        found.append((part_of(module_of(path)), path, ast.parse(path.read_text())))
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def targets(tree: ast.AST) -> Iterator[str]:
    """Name the modules of the package that a module imports, whenever it does.

    ``from package import module`` names the module alone: that the package's own ``__init__`` runs first is so for all.
    """
    for name in imported(tree):
        pieces = name.split(".")
        if pieces[0] != "gradwire":
            continue
        while pieces and not is_module(pieces):
            pieces.pop()
        yield ".".join(pieces)


def is_module(pieces: list[str]) -> bool:
    place = PACKAGE.parent.joinpath(*pieces)
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def part_of(module: str) -> str:
    """Return the part of :data:`LAYERS` that a module belongs to, the longest name of all."""
    pieces = module.split(".")[1:]
    names = (".".join(pieces[:n]) for n in range(len(pieces), 0, -1))
    return next((name for name in names if name in LAYERS), ".".join(pieces[:1]) or "__init__")


def is_package(module: str) -> bool:
    """Return whether a module holds others and nothing itself."""
    return module in {"gradwire.exchange", "gradwire.methods", "gradwire.tools"}


def test_imports_point_one_way() -> None:
    wrong = []
    for part, path, tree in modules():
        for target in targets(tree):
            if part_of(target) not in {part, *LAYERS.get(part, ())} and not is_package(target):
                wrong.append(f"{path.relative_to(PACKAGE)} imports {target}")
    assert not wrong


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return nodes of a graph that lead back to the first of them; empty where there are none."""
    state: dict[str, int] = {}
    trail: list[str] = []

    def visit(node: str) -> list[str]:
        state[node] = 1
        trail.append(node)
        for following in sorted(graph.get(node, ())):
            if state.get(following) == 1:
                return [*trail[trail.index(following) :], following]
            if following not in state and (found := visit(following)):
                return found
        state[node] = 2
        trail.pop()
        return []

    for node in graph:
        if node not in state and (found := visit(node)):
            return found
    return []


def test_parts_form_no_circle() -> None:
    assert circle({part: lower - {part} for part, lower in LAYERS.items()}) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]


def test_modules_form_no_circle() -> None:
    """Not even within a part, nor by imports inside functions or for types alone."""
    graph: dict[str, set[str]] = {}
    for _, path, tree in modules():
        module = module_of(path)
        graph[module] = set(targets(tree)) - {module, "gradwire"}
    assert circle(graph) == []


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for _, path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


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
            if part in ("tools.experiments", "tools.bench", "tools.cli") or not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            drawn = name in {f"{a}.{b}" for a, b in FORBIDDEN} or name.startswith(("np.random.", "random."))
            generated = name in {"torch.rand", "torch.randn", "torch.randint", "torch.randperm"}
            if drawn or (generated and not any(k.arg == "generator" for k in node.keywords)):
                wrong.append(f"{where} draws from a global generator: {name}")
    assert not wrong


FACTORIES = {"arange", "empty", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros"}
FLOATS = {"empty", "full", "linspace", "ones", "rand", "randn", "zeros"}
BY_DEFAULT = (
    # Modules, which are made as torch's own are.
    "graphs/models.py",
    # Programs, which leave torch's defaults as they are.
    "tools/",
)


def left_to_torch(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Name the tensors whose dtype, or device, is torch's default, which the user's program may change."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("torch."):
            continue
        name, said = ast.unparse(node.func).removeprefix("torch."), {keyword.arg for keyword in node.keywords}
        if name not in FACTORIES:
            continue
        parts = [part for argument in node.args for part in ast.walk(argument)]
        floats = any(isinstance(part, ast.Constant) and isinstance(part.value, float) for part in parts)
        if "dtype" not in said and (name in FLOATS or floats):
            yield node.lineno, f"{name} without a dtype"
        if "device" not in said:
            yield node.lineno, f"{name} without a device"


def test_no_tensor_has_a_dtype_or_a_device_by_default() -> None:
    wrong = []
    for _, path, tree in modules():
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(BY_DEFAULT):
            wrong += [f"{name}:{line}: {what}" for line, what in left_to_torch(tree)]
    assert wrong == []
    said = ["ones(2)", "tensor([1.0], device=d)", "arange(3)", "zeros(2, dtype=t, device=d)", "zeros_like(x)"]
    made = "\n".join(f"torch.{call}" for call in said)
    assert {line for line, _ in left_to_torch(ast.parse(made))} == {1, 2, 3}


UNPICKLING = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
    "ForkingPickler",
    "Unpickler",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "pickle",
    "shelve",
}
"""Names that stand for unpickling, or for a collective that does it: ranks tell one another tables instead."""


def unpickled(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Name the places of a module that may execute what a peer or a file says."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [part for name in imported(node) for part in name.split(".")]
        for name in UNPICKLING.intersection(names):
            yield node.lineno, name
        loads = isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
        if loads and "weights_only=True" not in [ast.unparse(keyword) for keyword in node.keywords]:
            yield node.lineno, "torch.load without weights_only=True"


def test_nothing_that_a_peer_or_a_file_says_is_unpickled() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} names {name}"
        for _, path, tree in modules()
        for line, name in unpickled(tree)
    ]
    assert wrong == []
    said = "import pickle\ndist.all_gather_object(a, b)\ntorch.load(f)\ntorch.load(f, weights_only=False)"
    assert {line for line, _ in unpickled(ast.parse(said))} == {1, 2, 3, 4}


def test_files_can_be_read_in_one_sitting() -> None:
    long = {str(p.relative_to(PACKAGE)): len(p.read_text().splitlines()) for _, p, _ in modules()}
    assert {name: lines for name, lines in long.items() if lines > 400} == {}


def test_every_method_is_in_the_tuple_the_cases_and_has_its_own_tag() -> None:
    found = set()
    for part, _, tree in modules():
        if part.startswith("methods") and part != "methods.auto":
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
def test_every_method_has_a_row_in_the_docs() -> None:
    text = (ROOT / "docs" / "methods.md").read_text()
    for kind in METHODS:
        assert f"| `{kind.name}` |" in text, f"docs/methods.md has no row for {kind.name}"
        family = kind.__module__.split(".")[2].replace("_", "-")
        page = ROOT / "docs" / "methods" / f"{family}.md"
        assert f"`{kind.name}`" in page.read_text(), f"docs/methods/{family}.md does not name {kind.name}"


@pytest.mark.repository
def test_the_first_page_counts_the_methods() -> None:
    assert f"All {len(METHODS)}\nmethods" in (ROOT / "README.md").read_text()


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
    """No optional library, no compiler, no process group comes with `import gradwire` and its names."""
    code = (
        "import sys, gradwire, gradwire.kernels; gradwire.attach;"
        "bad = [m for m in ('numba', 'llvmlite', 'triton', 'matplotlib', 'sklearn', 'typer', 'rich', 'jinja2') "
        "if m in sys.modules]; print(bad); sys.exit(bool(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_loads_nothing_before_a_name_is_used() -> None:
    code = (
        "import sys, gradwire as gw; before = set(sys.modules); assert not before & {'torch', 'gradwire.interface'};"
        # A subpackage of the same name must not take the function's place, whenever it is imported.
        "from gradwire.methods import registry; assert gw.methods is registry.methods;"
        "assert gw.TernGrad is registry.TernGrad and gw.errors.GradwireError and not hasattr(gw, 'TernGard');"
        "assert dir(gw) == sorted(gw.__all__); names = {}; exec('from gradwire import *', names);"
        "assert set(gw.__all__) <= set(names) and names['methods'] is gw.methods"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("given", "kept"), [(None, "1"), ("0", "0")])
def test_importing_has_gloo_ask_for_all_addresses_at_once(given: str | None, kept: str) -> None:
    code = "import gradwire, os; print(os.environ['GLOO_ENABLE_STORE_V2_API'])"
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_ENABLE_STORE_V2_API"}
    environment |= {} if given is None else {"GLOO_ENABLE_STORE_V2_API": given}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == kept


def test_public_names_exist_and_are_documented() -> None:
    for name in gradwire.__all__:
        value = getattr(gradwire, name)
        assert name.startswith("__") or value.__doc__, name
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.repository
def test_pages_are_those_of_the_committed_results() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "pages" / "summarise.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
