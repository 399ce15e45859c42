"""The section of ``docs/quantisers.md`` on today's formats, from the committed result of ``formats.py``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.lib.hops import TOPOLOGIES
from benchmarks.lib.page_parts import where
from benchmarks.lib.results import result

__all__ = ["lost", "pairs_of", "section", "settings_of"]

BUDGETS = (2, 3, 4, 5, 6, 8)
ALLOWANCE = 0.5
TIE = 1.05
"""Sampling leaves the errors of short vectors uncertain by some per cent."""


@dataclass(frozen=True)
class Entry:
    """What one quantiser does in one setting."""

    method: str
    bits: float
    error: float


@dataclass(frozen=True)
class Pair:
    """One of theirs beside the best of ours with no more bits; ``ratio`` is their error over ours."""

    setting: tuple[str, ...]
    theirs: Entry
    ours: Entry

    @property
    def ratio(self) -> float:
        return self.theirs.error / self.ours.error


Settings = dict[tuple[str, ...], dict[str, list[Entry]]]


def settings_of(found: dict[str, Any]) -> Settings:
    """Return the entries by setting (way, task, step, workers) and by whose they are."""
    settings: Settings = {}
    for method, ways in found["found"].items():
        for way, lines in ways.items():
            for line in lines:
                task, step, workers, bits, error = line.split()
                kinds = settings.setdefault((way, task, step, workers), {"ours": [], "theirs": [], "study": []})
                kinds[found["whose"][method]].append(Entry(method, float(bits), float(error)))
    return settings


def least(entries: Iterable[Entry], bits: float) -> Entry | None:
    """Return the entry with the least error of those with at most so many bits."""
    return min((entry for entry in entries if entry.bits <= bits), key=lambda entry: entry.error, default=None)


def pairs_of(settings: Settings, theirs: str | float, kind: str = "ours", way: str | None = None) -> list[Pair]:
    """Return a pair for each setting.

    Args:
        settings: All entries.
        theirs: A name, or a number of bits for which the best of theirs is taken.
        kind: What stands beside it: "ours" or "study".
        way: Take ours by this way, whichever theirs are by; None: by the same.
    """
    found = []
    for setting, kinds in settings.items():
        if isinstance(theirs, str):
            other = next((entry for entry in kinds["theirs"] if entry.method == theirs), None)
        else:
            other = least(kinds["theirs"], theirs + ALLOWANCE)
        beside = settings[(way, *setting[1:])] if way else kinds
        own = least(beside[kind], other.bits) if other else None
        if other and own:
            found.append(Pair(setting, other, own))
    return found


def lost(pairs: Iterable[Pair]) -> list[Pair]:
    """Return the pairs where theirs errs less."""
    return [pair for pair in pairs if pair.ratio < 1]


def usual(names: Iterable[str]) -> str:
    """Return the most frequent name."""
    return Counter(names).most_common(1)[0][0]


def brief(spec: str) -> str:
    """Write a spec as short as a table needs it."""
    name = spec.replace("Coded(compressor=", "").replace(", coder='rans')", ", coded").replace("compressor=", "")
    name = name.replace(", block_size=1024", "").replace(", spacing='uniform'", ", uniform")
    return f"`{name}`" if "(" in spec else spec


def span(pairs: list[Pair]) -> str:
    """Write the median, least and largest ratio, and how many of them are above 1."""
    ratios = [pair.ratio for pair in pairs]
    return f"{median(ratios):.2f} | {min(ratios):.2f} - {max(ratios):.2f} | {len(ratios) - len(lost(pairs))} of {len(ratios)}"


def by_bits(settings: Settings) -> list[str]:
    """Return the table at numbers of bits."""
    lines = [
        "| bits | way | theirs | their bits | ours | theirs / ours | least - largest | ours lower |",
        "|---:|---|---|---:|---|---:|---:|---:|",
    ]
    for budget in BUDGETS:
        for way in TOPOLOGIES:
            pairs = [pair for pair in pairs_of(settings, budget) if pair.setting[0] == way]
            if pairs:
                theirs, bits = usual(p.theirs.method for p in pairs), median(p.theirs.bits for p in pairs)
                ours = brief(usual(p.ours.method for p in pairs))
                lines.append(f"| {budget} | {way} | {theirs} | {bits:.2f} | {ours} | {span(pairs)} |")
    return lines


def by_format(settings: Settings, found: dict[str, Any]) -> list[str]:
    """Return the table of formats, each at its own bits."""
    lines = [
        "| theirs | bits | theirs / ours | least - largest | ours lower | ours higher, where |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name in (name for name, whose in found["whose"].items() if whose == "theirs"):
        pairs = pairs_of(settings, name)
        if not pairs:
            lines.append(f"| {name} | | | | | none of ours has as few bits |")
            continue
        bits = sorted(pair.theirs.bits for pair in pairs)
        wide = f"{bits[0]:.2f}" if bits[-1] - bits[0] < 0.05 else f"{bits[0]:.2f} - {bits[-1]:.2f}"
        lines.append(f"| {name} | {wide} | {span(pairs)} | {places(lost(pairs))} |")
    return lines


def all_of_them(settings: Settings) -> list[str]:
    """Return the table of all quantisers, by their bits."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for setting, kinds in settings.items():
        if setting[0] == "one hop" and setting[3] == "4":
            for whose, entries in kinds.items():
                for entry in entries:
                    found.setdefault((whose, entry.method), []).append(entry)
    rows = [(median(e.bits for e in es), median(e.error for e in es), *key) for key, es in found.items()]
    return [
        "| quantiser | whose | bits | vNMSE |",
        "|---|---|---:|---:|",
        *(f"| {brief(name)} | {whose} | {bits:.2f} | {error:.3g} |" for bits, error, whose, name in sorted(rows)),
    ]


def places(pairs: list[Pair]) -> str:
    """Write where pairs are: ways and tasks, with the worst ratio."""
    if not pairs:
        return "nowhere"
    told = []
    for way in TOPOLOGIES:
        mine = [pair for pair in pairs if pair.setting[0] == way]
        if mine:
            tasks = ", ".join(f"{task} {count}" for task, count in Counter(pair.setting[1] for pair in mine).items())
            told.append(f"{way}: {tasks} (down to {min(pair.ratio for pair in mine):.2f})")
    return "; ".join(told)


def study(settings: Settings) -> list[str]:
    """Return what bits by energy would do, beside DynamiQ and beside the best of ours."""
    lines = [
        "| beside | way | theirs / the study's | least - largest | the study lower |",
        "|---|---|---:|---:|---:|",
    ]
    for name in ("DynamiQ, 4 bits", "DynamiQ, 5 bits"):
        for way in TOPOLOGIES:
            pairs = [pair for pair in pairs_of(settings, name, "study") if pair.setting[0] == way]
            if pairs:
                lines.append(f"| {name} | {way} | {span(pairs)} |")
    for way in TOPOLOGIES:
        gains = []
        for setting, kinds in settings.items():
            for entry in kinds["study"] if setting[0] == way else ():
                own = least(kinds["ours"], entry.bits)
                if own:
                    gains.append(Pair(setting, own, entry))
        if gains:
            lines.append(f"| the best of ours at the study's bits | {way} | {span(gains)} |")
    return lines


def direct_beside_hops(settings: Settings) -> list[str]:
    """Return the table of theirs by a ring or a butterfly, and ours by the owner of a chunk."""
    lines = [
        "| bits | theirs by | theirs | theirs / ours by direct | least - largest | ours lower |",
        "|---:|---|---|---:|---:|---:|",
    ]
    for budget in BUDGETS:
        for way in TOPOLOGIES[2:]:
            pairs = [pair for pair in pairs_of(settings, budget, way="direct") if pair.setting[0] == way]
            if pairs:
                lines.append(f"| {budget} | {way} | {usual(p.theirs.method for p in pairs)} | {span(pairs)} |")
    return lines


def verdict(settings: Settings) -> list[str]:
    """Say, for each number of bits, by which ways ours are lower everywhere, and where they are not."""
    lines = []
    for budget in BUDGETS:
        every, told = [], []
        for way in TOPOLOGIES:
            pairs = [pair for pair in pairs_of(settings, budget) if pair.setting[0] == way]
            behind = [pair for pair in lost(pairs) if pair.ratio < 1 / TIE]
            if not behind:
                every.append(way)
                continue
            workers = sorted({int(pair.setting[3]) for pair in behind})
            told.append(
                f"{way}: their error is lower in {len(behind)} of {len(pairs)} settings (workers: {', '.join(map(str, workers))}), "
                f"down to {min(pair.ratio for pair in behind):.2f} of ours"
            )
        if every:
            told.insert(
                0, f"{', '.join(every)}: our error is lower, or at most {100 * (TIE - 1):.0f} % higher, in all settings"
            )
        lines.append(f"- **{budget} bits**: {'; '.join(told)}.")
    return lines


def section() -> list[str]:
    """Describe the errors of today's formats and of ours at equal bits."""
    found = result("claims/formats")
    if not found:
        return []
    settings = settings_of(found)
    counts, steps = found["workers"], found["steps"]
    return [
        "## Beside today's formats",
        "",
        "`python benchmarks/claims/formats.py --mnist FOLDER --cifar10 FOLDER --json benchmarks/results/claims/formats.json`. "
        f"{where(found)}.",
        "",
        f"This section compares our quantisers with published formats on gradients of four tasks (digits, MNIST, a transformer on text, CIFAR-10) after {steps[0]} and "
        f"{steps[1]} steps. There are {counts[0]} to {counts[-1]} workers with distinct batches (at most 8 in the early step), and {found['numel']:,} elements of each gradient, in pieces of "
        "1024 neighbours. vNMSE is |estimate - mean|^2 / |mean|^2, as THC and DynamiQ report it. Bits are all bits that are sent for an element in "
        "one direction, with scales, tables and padding. There are four ways to add gradients up:",
        "",
        "- *One hop*: all workers send to all.",
        "- *Direct*: the owner of a chunk adds up what all workers send it, and sends the sum to all, as two-shot does here.",
        "- *Ring* and *butterfly*: partial sums are quantised again at each hop, and the sum once more for all workers.",
        "",
        "Codes of THC and of methods with a shared scale are added without being quantised again; the codes of their sums are wider.",
        "",
        "Ratios are their error divided by ours, and exceed 1 if ours is lower. Our quantiser never takes more bits than theirs. "
        "Compared with the best of theirs at each number of bits:",
        "",
        *verdict(settings),
        "",
        f"For each number of bits, the table compares the best of theirs, with up to {ALLOWANCE} more bits for scales, with the best of ours that takes at "
        "most as many bits. It names the quantisers that are best most often.",
        "",
        *by_bits(settings),
        "",
        "A ring, a butterfly and an owner for each chunk send the same bytes. Our quantisers use owners (two-shot), so nothing is quantised "
        "more than twice; with two workers, hops quantise less often. The next table compares theirs by hops with ours by owners.",
        "",
        *direct_beside_hops(settings),
        "",
        "The next table compares each of theirs at its own bits with ours, over all ways, tasks and workers. The last column counts settings.",
        "",
        *by_format(settings, found),
        "",
        "Our quantisers win by their coder: with it, evenly spaced levels of rotated blocks come within 1.53 dB of the best possible code for normal values. "
        "They lose in four cases:",
        "",
        "- At 2 bits, TurboQuant's estimate is shorter than the vector. Such an estimate has a smaller error than an unbiased one if few are averaged.",
        "- On a ring of many workers, an unbiased quantiser with error e multiplies the squared length of what it sends by 1 + e at each hop, which makes 2 or 3 bits useless. "
        "A quantiser that shortens vectors avoids this growth.",
        "- If energies differ much from block to block, as on CIFAR-10, DynamiQ, which gives bits by energy, is ahead in some settings with few workers at 5 and 6 bits.",
        "- EDEN ends at 6 bits. At 8 bits, our quantiser rounds to levels at random, with twice the variance of rounding to the nearest level, and has at most 255 levels "
        "with a coder.",
        "",
        *grown(settings),
        "The next table has every quantiser in one hop with 4 workers, as medians over tasks and steps.",
        "",
        *all_of_them(settings),
        "",
        "### Bits by energy",
        "",
        "DynamiQ gains by giving more bits to blocks with more energy. This section studies the idea; gradwire has no method for it. `EDEN` on blocks of 256 "
        "takes for each block the bits that minimise the error of all blocks. Workers choose them by the energies, which they add up beforehand for 16 bits a block. "
        "There are up to 8 workers. Blocks with little energy get less than one bit, and their unbiased error grows on a ring.",
        "",
        *study(settings),
        "",
        "### What is uncertain",
        "",
        "- DynamiQ's text leaves open how strongly its levels grow. The growth here is the one with the least error for groups of normal values. The authors publish, for "
        "the gradients of language models on a ring of 4 workers with 5 bits, 0.00217 (BERT-large), 0.00149 and 0.00096 (LLaMA 1B), and 0.00122 (Gemma 1B); "
        f"the measurement here has {measured_range(settings, 'DynamiQ, 5 bits', 'ring', '4')}. The energies of these models differ more from block to block. "
        "DynamiQ's elements of 16 bits are taken to be bfloat16.",
        "- THC is meant to run with error feedback, which sends later what was cut off; the error of one round does not show this. THC's "
        "sums have the smallest whole number of bits that holds them.",
        "- TurboQuant rotates by random signs and a Hadamard transform here, drawn anew each time, instead of by one random orthogonal matrix, and "
        "has 32 bits for the length of 1024 elements.",
        "- MX scales are the specification's powers of two, 8 bits for 32 elements; DynamiQ's authors used 16 bits. They publish 0.0030 to 0.0059 "
        f"for MXFP8 on a ring of 4 workers; the measurement here has {measured_range(settings, 'MXFP8 E4M3', 'ring', '4')} (E4M3).",
        "- Vectors with so few elements leave the errors uncertain by a few per cent. A coder's tables are counted for a vector "
        "four times as long; they matter less in buckets of millions of elements.",
        "",
    ]


def grown(settings: Settings) -> list[str]:
    """Write by how much hops multiply the error of coded levels, of which every setting has one."""
    told = []
    for way in TOPOLOGIES[1:]:
        ratios = []
        for setting, kinds in settings.items():
            once = settings.get(("one hop", *setting[1:]))
            for entry in kinds["ours"] if setting[0] == way and setting[3] == "64" and once else ():
                same = next((other for other in once["ours"] if other.method == entry.method), None) if once else None
                if same and "EDEN(bits=4.85" in entry.method:
                    ratios.append(entry.error / same.error)
        if ratios:
            told.append(f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.0f} ({way})")
    if not told:
        return []
    return [
        f"For 64 workers, the error of `EDEN` with 5 bits is larger than in one hop by a factor of {', '.join(told)}.",
        "",
    ]


def measured_range(settings: Settings, name: str, way: str, workers: str) -> str:
    """Write the least and the largest error of one of theirs over tasks and steps."""
    errors = [
        entry.error
        for setting, kinds in settings.items()
        for entry in kinds["theirs"]
        if entry.method == name and setting[0] == way and setting[3] == workers
    ]
    return f"{min(errors):.2g} to {max(errors):.2g}" if errors else "not measured"
