"""Verdicts on runs: what a method saved against float32, what it cost, and whether it paid; also numbers as text."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.tools.report.load import TUNED, Run, setting_text
from gradwire.tools.report.summary import RunSummary, first_reaching, mean_step_s, summarize

BEHIND = 0.01
"""Loss of final accuracy against float32 from which a method without error feedback is advised against."""

SAME = 0.03
"""Relative difference below which two times count as the same."""

UNSAID = "so whether it paid is not said."


def bytes_text(count: float) -> str:
    """Return a number of bytes as text with a decimal unit.

    Example:
        >>> bytes_text(1_234_567)
        '1.23 MB'
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """Return a duration as text in milliseconds, seconds, minutes, or from 1000 minutes on in hours."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 60 * 999.5 else f"{seconds / 3600:.1f} h"


def rate_text(bits_per_s: float | None) -> str:
    """Return a bandwidth as text with a decimal unit; None: not limited.

    Example:
        >>> rate_text(1e9), rate_text(None)
        ('1 Gbit/s', 'unlimited')
    """
    if bits_per_s is None:
        return "unlimited"
    for unit, size in (("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3)):
        if bits_per_s >= size:
            return f"{bits_per_s / size:g} {unit}/s"
    return f"{bits_per_s:g} bit/s"


def ratio_text(ratio: float) -> str:
    """Return a ratio of times as text, such as "1.4 times as long" or "the same, within 3 %"."""
    if abs(ratio - 1.0) < SAME:
        return f"the same, within {SAME:.0%}"
    return f"{ratio:.2f} times as long"


def percent(share: float) -> str:
    """Return a share as a percentage with two decimals."""
    return f"{100 * share:.2f} %"


def baseline_of(run: Run, runs: Sequence[Run]) -> Run | None:
    """Return the float32 run with the same task, seed and workers; of several, the one with the most like settings."""
    found = [
        other
        for other in runs
        if other.config["method"].startswith("FP32(") and other.setting == run.setting and other is not run
    ]
    return min(
        found, key=lambda other: (other.elastic, len(_fixed(run, other)), len(run.differing(other))), default=None
    )


def _fixed(run: Run, base: Run) -> list[str]:
    """Return the settings that differ although a comparison needs them to be the same."""
    return [name for name in run.differing(base) if name not in TUNED]


def verdicts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return the label and a paragraph for each run by another method than float32."""
    compared = [run for run in runs if not run.config["method"].startswith("FP32(")]
    return [(run.label, verdict(run, baseline_of(run, runs))) for run in compared]


def verdict(run: Run, base: Run | None) -> str:
    """Describe what the method saved, what it cost, and whether it paid."""
    saved = _bytes(summarize(run))
    if base is None:
        return f"{saved} No fp32 run of the same task, seed and workers is shown, {UNSAID}"
    fixed = _fixed(run, base)
    if fixed:
        return f"{saved} The fp32 run had {_with(base, fixed)}, and this one {_with(run, fixed)}, {UNSAID}"
    if run.elastic or base.elastic:
        # Its rows begin where it was taken in, and so does its time.
        return f"{saved} Workers of {'this' if run.elastic else 'the fp32'} run could come and go, {UNSAID}"
    simulated, why = run.config["simulated"], _no_measure(base)
    told = [saved] if simulated else [saved, _step_time(run, base)]
    if why is not None:
        return " ".join([*told, f"{why}, {UNSAID}"])
    accuracy, ratio = _accuracy(run, base)
    told.append(accuracy)
    if simulated:
        told.append("The workers were simulated, so times say nothing about a network.")
    elif ratio is None and run.early_end is not None:
        told.append(f"The run {run.early_end}, {UNSAID}")
    else:
        told.append(_conclusion(run, base, ratio))
    tuned = run.differing(base)
    if tuned:
        told.append(f"It was trained with {_with(run, tuned)}, and fp32 with {_with(base, tuned)}.")
    return " ".join([*told, *_hints(run, base)])


def _with(run: Run, names: Sequence[str]) -> str:
    return ", ".join(setting_text(name, run.conditions[name]) for name in names)


def _no_measure(base: Run) -> str | None:
    """Return why no run can be judged by a float32 run; None if runs can."""
    if base.early_end is not None:
        return f"The fp32 run {base.early_end}"
    final = summarize(base).final_accuracy
    if final is None:
        return "The fp32 run has no evaluation to compare with"
    reached = first_reaching(base, final)
    if reached is None or not reached["step"]:
        return "The fp32 run ended no more accurate than it began"
    return None


def _bytes(numbers: RunSummary) -> str:
    if not numbers.sent_bytes:
        return "It sent nothing."
    if not numbers.compression_factor or numbers.bits_per_element is None:
        return f"Each worker sent {bytes_text(numbers.sent_bytes)}."
    times = f"{numbers.compression_factor:.1f} times less" if numbers.compression_factor >= 1 else "more"
    return (
        f"Each worker sent {bytes_text(numbers.sent_bytes)} where a float32 all-reduce sends "
        f"{bytes_text(numbers.dense_bytes)}: {times}, {numbers.bits_per_element:.2f} bits per element."
    )


def _step_times(run: Run, base: Run) -> tuple[float | None, float | None, str]:
    """Return the step times of both runs, and how they are to be read."""
    if run.exchanges_seldom:
        return mean_step_s(run), mean_step_s(base), "means, since most steps exchange nothing"
    return summarize(run).step_time_s, summarize(base).step_time_s, "medians"


def _step_time(run: Run, base: Run) -> str:
    mine_s, theirs_s, kind = _step_times(run, base)
    if not mine_s or not theirs_s:
        return "No step was timed."
    return (
        f"A step took {seconds_text(mine_s)} against fp32's {seconds_text(theirs_s)} "
        f"({kind}): {ratio_text(mine_s / theirs_s)}."
    )


def _accuracy(run: Run, base: Run) -> tuple[str, float | None]:
    """Describe when fp32's final accuracy was reached; also return the ratio of times, or None if it was not."""
    target = base.of("eval")[-1]["accuracy"]
    mine, theirs = first_reaching(run, target), first_reaching(base, target)
    if mine is None or theirs is None:
        numbers = summarize(run)
        best = "it was never evaluated"
        if numbers.best_accuracy is not None:
            best = f"its best was {percent(numbers.best_accuracy)}, at step {numbers.best_accuracy_step}"
        return f"It did not reach fp32's final accuracy of {percent(target)}: {best}.", None
    text = f"It first reached fp32's final accuracy of {percent(target)} at step {mine['step']}"
    if run.config["simulated"]:
        return f"{text}; fp32 at step {theirs['step']}.", None
    ratio = mine["elapsed_s"] / theirs["elapsed_s"] if theirs["elapsed_s"] else None
    return (
        f"{text}, after {seconds_text(mine['elapsed_s'])} of training; fp32 at step {theirs['step']}, "
        f"after {seconds_text(theirs['elapsed_s'])}.",
        ratio,
    )


def _hints(run: Run, base: Run) -> list[str]:
    """Return advice if a method without error feedback has lost accuracy."""
    if run.early_end is not None:
        return []
    reached, target = summarize(run).final_accuracy, summarize(base).final_accuracy
    if reached is None or target is None or reached >= target - BEHIND:
        return []
    around = run.config.get("with_feedback")
    if around is None:
        return []
    return [
        f"{run.config['method']} sends a part of the gradient and forgets the rest, which costs accuracy: "
        f"try {around}, which sends the rest later, or a method without bias such as EDEN(bits=4)."
    ]


def _conclusion(run: Run, base: Run, ratio: float | None) -> str:
    fewer = run.rows[-1]["sent_bytes"] < run.rows[-1]["dense_bytes"]
    if ratio is None:
        mine_s, theirs_s, _ = _step_times(run, base)
        faster = mine_s is not None and theirs_s is not None and mine_s < theirs_s * (1 - SAME)
        if faster:
            return "Steps were faster, but the accuracy was not reached: it did not pay here."
        return "It did not pay here: neither the accuracy was reached nor were steps faster."
    if ratio < 1 - SAME:
        return f"It paid: the same accuracy in {ratio:.2f} of the time."
    if ratio <= 1 + SAME:
        return "It saved bytes but no time here." if fewer else "It saved neither bytes nor time here."
    told = f"It did not pay in time here: {ratio:.2f} times as long to the same accuracy"
    if fewer:
        told += ". Fewer bytes help once the link, not the processor, sets the pace"
    if not fewer or run.config.get("lab"):
        return f"{told}."
    return f"{told}; local workers talk over memory, the fastest link there is."
