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
                f"{way}: theirs are lower in {len(behind)} of {len(pairs)} settings (workers: {', '.join(map(str, workers))}), "
                f"their error down to {min(pair.ratio for pair in behind):.2f} of ours"
            )
        if every:
            told.insert(0, f"ours are lower, or within {100 * (TIE - 1):.0f} %, in all settings of {', '.join(every)}")
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
        f"Gradients of four tasks (digits, MNIST, a transformer on text, CIFAR-10) after {steps[0]} and {steps[1]} steps, of distinct "
        f"batches, {counts[0]} to {counts[-1]} workers, {found['numel']:,} elements of each in pieces of 1024 neighbours. The early step has up to 8 workers. "
        "vNMSE is |estimate - mean|^2 / |mean|^2, as THC and DynamiQ report it; bits are all that is sent for an element in "
        "one direction, with scales, tables and padding. One hop: all send to all. Direct: the owner of a chunk adds what "
        "all send it, and sends the sum to all, as two-shot does here. Ring and butterfly: partial sums are quantised again "
        "at each hop, and the sum once more for all. Codes of THC and of methods with a shared scale are added, and not "
        "quantised again; their sums are wider.",
        "",
        "Ratios are their error over ours, above 1 where ours is lower; ours never has more bits. Of the best of theirs:",
        "",
        *verdict(settings),
        "",
        f"At each number of bits, the best of theirs with up to {ALLOWANCE} more for scales, and the best of ours with at most the bits "
        "of that one. Names are those that are best most often:",
        "",
        *by_bits(settings),
        "",
        "A ring, a butterfly and an owner for each chunk send the same bytes. Ours go by owners (two-shot), so that nothing is quantised "
        "more than twice; of two workers, hops quantise less. Theirs by hops, beside ours by owners:",
        "",
        *direct_beside_hops(settings),
        "",
        "Each of theirs at its own bits, over all ways, tasks and workers; the last column counts settings:",
        "",
        *by_format(settings, found),
        "",
        "Ours gain by a coder: evenly spaced levels of rotated blocks are 1.53 dB from what any code could do with normal values. "
        "They lose in four places. At 2 bits TurboQuant's estimate is shorter than the vector, which errs less than one "
        "without bias where little is averaged. On a ring of many workers an unbiased quantiser with error e lengthens what "
        "it sends by 1 + e at each hop, which makes 2 or 3 bits useless; what is shortened does not grow so. Where energies differ much from block to block, as on CIFAR-10, DynamiQ's bits by energy are ahead in some settings of few workers at 5 and 6 bits. And EDEN ends at 6 bits: at 8, "
        "ours are levels that are rounded at random, with twice the variance of the nearest level, and at most 255 of them "
        f"behind a coder. {grown(settings)}",
        "",
        "Every quantiser where all send to all, 4 workers, medians over tasks and steps:",
        "",
        *all_of_them(settings),
        "",
        "### Bits by energy",
        "",
        "Blocks with more energy are worth more bits: DynamiQ's gain. A study, not a method here: `EDEN` on blocks of 256, with the bits that leave "
        "the least error of all blocks, which workers choose by the energies that they have summed before, for 16 bits a block; up to 8 workers. Blocks with "
        "little energy get less than a bit, and their unbiased error grows on a ring.",
        "",
        *study(settings),
        "",
        "### What is uncertain",
        "",
        "- DynamiQ's text leaves open how strongly its levels grow. Taken is what errs least for groups of normal values. Published for "
        "the gradients of language models, ring, 4 workers, 5 bits: 0.00217 (BERT-large), 0.00149 and 0.00096 (LLaMA 1B), 0.00122 (Gemma 1B); "
        f"measured here: {measured_range(settings, 'DynamiQ, 5 bits', 'ring', '4')}. These models' energies differ more from block to block. "
        "Its elements of 16 bits are taken as bfloat16.",
        "- THC is meant to run with error feedback, which sends later what is cut at first, and is not in the error of one round. Its "
        "sums have the least whole number of bits that holds them.",
        "- TurboQuant rotates by random signs and a Hadamard transform here, drawn anew each time, instead of by one random orthogonal matrix, and "
        "has 32 bits for the length of 1024 elements.",
        "- MX scales are the specification's powers of two, 8 bits for 32 elements; DynamiQ's authors took 16 bits. Published "
        "there for MXFP8, ring, 4 workers: 0.0030 to 0.0059; measured here (E4M3): "
        f"{measured_range(settings, 'MXFP8 E4M3', 'ring', '4')}.",
        "- A vector of so few elements leaves errors uncertain by a few per cent. A coder's tables are counted for "
        "one four times as long, and weigh less in buckets of millions of elements.",
        "",
    ]


def grown(settings: Settings) -> str:
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
        return ""
    return f"For 64 workers the way of sums multiplies the error of `EDEN` of 5 bits, against one hop, by {', '.join(told)}."


def measured_range(settings: Settings, name: str, way: str, workers: str) -> str:
    """Write the least and the largest error of one of theirs over tasks and steps."""
    errors = [
        entry.error
        for setting, kinds in settings.items()
        for entry in kinds["theirs"]
        if entry.method == name and setting[0] == way and setting[3] == workers
    ]
    return f"{min(errors):.2g} to {max(errors):.2g}" if errors else "not measured"
