#!/bin/sh
# Build the wheel, check that it is pure Python, install it into an empty folder, and run the tests that need no
# repository around them from another empty folder. Needs no network.
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
# What the wheel may lack is a file: the tests of arithmetic, which ran against the same sources, need not run again.
"$python" -m pytest -n 2 --dist loadfile -q -m "not ranks and not repository" \
    tests/cli tests/report tests/bench tests/experiments tests/model tests/planning tests/test_doctests.py
# And real ranks, in every mode of DDP.
"$python" -m pytest -q tests/adapters/test_ddp_modes.py
