"""Measurements of gradwire: programs by shelf, and what they found in ``results/``; ``README.md`` is the index.

Imports name the whole path, for example ``from benchmarks.lib.runs import write``. A program that is run by its path,
as ``python benchmarks/claims/variance.py``, has only its own folder on ``sys.path``, so it puts the repository's first:

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
"""
