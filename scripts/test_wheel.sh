#!/bin/sh
# Build the wheel, check that it is pure Python and has every file of the package, install it into an empty folder, and
# run from another empty folder tests that need no repository around them. Needs no network.
set -eu
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
repo=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/dist" "$repo"
wheel=$(ls "$work"/dist/*.whl)
case "$wheel" in
    *-py3-none-any.whl) ;;
    *) echo "the wheel is not pure Python: $wheel" >&2; exit 1 ;;
esac
"$python" - "$wheel" "$repo/src" <<'END'
import sys, zipfile
from pathlib import Path
archive, source = zipfile.ZipFile(sys.argv[1]), Path(sys.argv[2])
packed = {name: archive.read(name) for name in archive.namelist() if name.startswith("gradwire/")}
found = [p for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
files = {str(p.relative_to(source)): p.read_bytes() for p in found}
wrong = sorted(name for name in packed.keys() | files.keys() if packed.get(name) != files.get(name))
sys.exit(f"not the same in the wheel and in the package: {', '.join(wrong)}" if wrong else 0)
END
"$python" -m pip install --quiet --no-deps --no-index --target "$work/site" "$wheel"
mkdir "$work/empty"
cd "$work/empty"
export PYTHONPATH="$work/site"
where=$("$python" -c 'import gradwire; print(gradwire.__file__)')
case "$where" in
    "$work"/site/*) ;;
    *) echo "the tests would import $where, not the wheel" >&2; exit 1 ;;
esac
cp -r "$repo/tests" "$work/empty/tests"
cp "$repo/pyproject.toml" "$work/empty/"
# All files have the bytes of the sources: what may still go wrong is how files that are no modules are found, and the
# commands. All other tests ran against the same sources and need not run again.
"$python" -m pytest -n 2 --dist loadfile -q -m "not ranks and not repository" tests/cli/test_commands.py tests/report
# And real ranks under DDP, to which the command attaches.
"$python" -m gradwire run --nproc-per-node 2 --method terngrad "$repo/examples/digits.py" --steps 20
