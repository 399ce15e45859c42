"""What becomes of exchanges in which one message of one rank changes on the way: counts of outcomes, no times.

    python benchmarks/trials/messages.py --exchanges 30000 --json benchmarks/results/trials/trials_messages.json

Three simulated ranks exchange by every method in several settings (``settings.py``) and each of its protocols, by the
reduce-scatter where a method serves it, and by differences of weights; four by each method on two levels. In round 2
one message to one rank changes (``lib/corruptions.py``): bits flip, bytes or blocks change places, the tail is lost, an
earlier message comes again, two ranks' messages are exchanged. A sum of the backend is not tried, since it has no
payload (``fp32``, ``fp16``, ``bf16``). Maxima of scales are not either: the driver of real ranks seals them
(``tests/exchange/test_small_messages.py``).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.corruptions import CHANGES, OUTCOMES, Trials, WeightTrials
from benchmarks.lib.runs import write
from benchmarks.trials.settings import settings

WEIGHTS = gw.QSGDinf(levels=7, block_size=128)
"""The default of :func:`gradwire.compress_weights`."""


def ways() -> Iterator[tuple[str, str, Callable[[], Trials]]]:
    """Yield what is tried: a method, the name of its way, and what prepares the trials."""
    for method in settings():
        for name in method.traits.collectives:
            if name != "all_reduce":
                yield repr(method), name, partial(Trials, method, name)
        if serves(lambda method=method: Trials(method, "reduce_scatter")):
            yield repr(method), "reduce_scatter", partial(Trials, method, "reduce_scatter")
        if serves(lambda method=method: gw.Hierarchical(compressor=method, node_size=2)):
            levels = gw.Hierarchical(compressor=method, node_size=2)
            for name in levels.traits.collectives:
                if name != "all_reduce":
                    yield repr(method), f"{name} on two levels", partial(Trials, levels, name, workers=4)
    yield repr(WEIGHTS), "differences of weights", partial(WeightTrials, WEIGHTS)


def serves(build: Callable[[], object]) -> bool:
    """Return whether something can be built."""
    try:
        build()
    except (KeyError, gw.GradwireError):
        return False
    return True


def count(exchanges: int) -> list[dict[str, Any]]:
    """Spread so many exchanges evenly over methods, protocols and kinds of change; return a row for each of these."""
    chosen = list(ways())
    each = -(-exchanges // (len(chosen) * len(CHANGES)))
    rows = []
    for method, name, prepare in chosen:
        trials = prepare()
        for number, kind in enumerate(CHANGES):
            outcomes = Counter(trials.one(kind, 1_000_000 * number + draw) for draw in range(each))
            unchanged = outcomes.pop(None, 0)
            if outcomes:
                counts = {outcome: outcomes[outcome] for outcome in OUTCOMES}
                rows.append({"method": method, "collective": name, "change": kind, **counts, "same": unchanged})
    return rows


def added_up(rows: list[dict[str, Any]], by: tuple[str, ...]) -> list[dict[str, Any]]:
    """Add the counts of rows that agree in some columns."""
    found: dict[tuple[str, ...], Counter[str]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in by), Counter()).update({name: row[name] for name in OUTCOMES})
    return [{**dict(zip(by, key)), **{name: counts[name] for name in OUTCOMES}} for key, counts in found.items()]


def main() -> int:
    """Count and print; exit with 1 where a change was not refused by name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchanges", type=int, default=30_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = count(arguments.exchanges)
    total = Counter({outcome: sum(row[outcome] for row in rows) for outcome in OUTCOMES})
    by_change = added_up(rows, ("change",))
    for row in by_change:
        print(f"{row['change']:28s}", *(f"{name}: {row[name]}" for name in OUTCOMES if row[name]), sep="  ")
    print(f"{sum(total.values())} exchanges in which a byte changed:", dict(total))
    if arguments.json:
        by_way = added_up(rows, ("method", "collective"))
        outcomes = {"exchanges": sum(total.values()), "ways": len(by_way), "outcomes": dict(total)}
        write(arguments.json, **outcomes, by_change=by_change, by_method=by_way)
    return int(total["refused, named"] != sum(total.values()))


if __name__ == "__main__":
    sys.exit(main())
