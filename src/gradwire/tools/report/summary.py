"""Numbers of a run, and lines about its link: the choice of ``auto``, the entropy coder, a return to the fallback."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.tools.report.load import Run, load_runs


def choice_text(chosen: str | None, reason: str | None, note: str | None = None) -> str | None:
    """Describe the choice of ``auto`` in one line; None if there was nothing to choose.

    Args:
        chosen: The method; None before the choice.
        reason: The reason for it; None if there was nothing to choose.
        note: What the choice costs in accuracy, and with which momentum and learning rate to train.

    Example:
        >>> choice_text("bf16", "the fastest of 3 in 4 turns of 3 steps")
        'auto took bf16 (the fastest of 3 in 4 turns of 3 steps)'
    """
    if chosen is not None:
        return f"auto took {chosen} ({reason})" + ("" if note is None else f": {note}")
    return None if reason is None else "auto had not chosen yet: its trial takes more steps than these"


def choice_details(choice: Mapping[str, Any]) -> str:
    """Describe in one line the choice, the step time of each candidate, and the candidates left out."""
    text = choice_text(choice.get("chosen"), choice.get("reason"), choice.get("note"))
    parts = [text or "nothing was chosen"]
    steps = [f"{spec} {step_s * 1e3:.3g} ms" for spec, step_s in (choice.get("step_s") or {}).items()]
    if steps:
        parts.append(f"a step took {', '.join(steps)}")
    parts += [f"{spec} was {why}" for spec, why in (choice.get("left_out") or {}).items()]
    return "; ".join(parts)


def coder_text(coder: Mapping[str, Any]) -> str:
    """Describe in one line which entropy coder ran, why, and the times of all, from a link's record.

    Example:
        >>> times = {"rans": 0.002, "huffman": 0.001}
        >>> coder_text({"chosen": "huffman", "reason": "the least time here", "encode_decode_s": times})
        'huffman (the least time here): rans 2 ms, huffman 1 ms'
    """
    times = [f"{name} {seconds * 1e3:.3g} ms" for name, seconds in (coder.get("encode_decode_s") or {}).items()]
    return f"{coder['chosen']} ({coder['reason']})" + (f": {', '.join(times)}" if times else "")


def fallback_reason(returned: Mapping[str, Any]) -> str:
    """Describe when and why ranks returned to the fallback, from a link's record."""
    return (
        f"from round {returned['since_round']} on: what rank {returned['rank']} sent was off by "
        f"{returned['relative_error']:.3g} times the gradient's norm"
    )


def fallback_text(method: str | None, reason: str | None) -> str | None:
    """Describe a return to the fallback in one line; None if there was none.

    Example:
        >>> fallback_text("BF16()", "from round 2 on")
        'returned to BF16() (from round 2 on)'
    """
    return None if method is None else f"returned to {method} ({reason})"


def link_texts(row: Mapping[str, Any]) -> list[str]:
    """Return lines about the link of a run, from the run's flat numbers."""
    texts = (
        choice_text(row["chosen_method"], row["choice_reason"], row["choice_note"]),
        fallback_text(row["fallback_method"], row["fallback_reason"]),
    )
    return [text for text in texts if text is not None]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Numbers of one run. Bytes are rank 0's; times leave out evaluation, checkpoints and start-up.

    ``step_time_s`` is the median of the rows' times. With local steps it is the mean of all steps, and there are no
    percentiles: most steps exchange nothing.
    ``final_*`` is the last evaluation, ``best_*`` the one with the highest accuracy; both are None if the run ended
    before its first. ``chosen_method`` is the choice of ``auto``, ``choice_reason`` its reason: both are None if there
    was nothing to choose, and only the method is None if the trial did not end. ``choice_note`` says what the choice
    costs in accuracy, and with which momentum and learning rate to train; None where nothing is known.
    ``fallback_method`` is the method that ranks returned to, ``fallback_reason`` says when and why; both are None if
    they did not.
    """

    run: str
    label: str
    task: str
    method: str
    workers: int
    simulated: bool
    seed: int
    steps: int
    final_loss: float | None
    final_accuracy: float | None
    best_accuracy: float | None
    best_accuracy_step: int | None
    step_time_s: float | None
    step_time_p20_s: float | None
    step_time_p80_s: float | None
    elapsed_s: float
    sent_bytes: int
    received_bytes: int
    dense_bytes: int
    compression_factor: float | None
    bits_per_element: float | None
    chosen_method: str | None
    choice_reason: str | None
    choice_note: str | None
    fallback_method: str | None
    fallback_reason: str | None

    def flat(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)


def quantile(values: list[float], share: float) -> float:
    """Return a quantile of values, of which there must be at least one, by linear interpolation."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def mean_step_s(run: Run) -> float | None:
    """Return the mean time of a step, with the exchanges of local steps; None if no step was timed."""
    # A worker that joined late has no row of step 0.
    first, last = run.rows[0], run.rows[-1]
    steps = last["step"] - first["step"]
    return (last["elapsed_s"] - first["elapsed_s"]) / steps if steps > 0 else None


def summarize(run: Run) -> RunSummary:
    """Compute a run's numbers."""
    evaluations, last = run.of("eval"), run.rows[-1]
    best = max(evaluations, key=lambda row: row["accuracy"], default=None)
    times_s = [] if run.exchanges_seldom else [row["step_time_s"] for row in run.of("train")]
    middle_s = statistics.median(times_s) if times_s else None
    sent, dense = last["sent_bytes"], last["dense_bytes"]
    link = run.config.get("link") or {}
    choice, returned = link.get("choice") or {}, link.get("fallback")
    return RunSummary(
        run=str(run.path),
        label=run.label,
        task=run.config["task"],
        method=run.config["method"],
        workers=run.config["world_size"],
        simulated=run.config["simulated"],
        seed=run.config["seed"],
        steps=last["step"],
        final_loss=evaluations[-1]["loss"] if evaluations else None,
        final_accuracy=evaluations[-1]["accuracy"] if evaluations else None,
        best_accuracy=best["accuracy"] if best else None,
        best_accuracy_step=best["step"] if best else None,
        step_time_s=mean_step_s(run) if run.exchanges_seldom else middle_s,
        step_time_p20_s=quantile(times_s, 0.2) if times_s else None,
        step_time_p80_s=quantile(times_s, 0.8) if times_s else None,
        elapsed_s=last["elapsed_s"],
        sent_bytes=sent,
        received_bytes=last["received_bytes"],
        dense_bytes=dense,
        compression_factor=dense / sent if sent else None,
        bits_per_element=32.0 * sent / dense if dense else None,
        chosen_method=choice.get("chosen"),
        choice_reason=choice.get("reason"),
        choice_note=choice.get("note"),
        fallback_method=returned["method"] if returned else None,
        fallback_reason=fallback_reason(returned) if returned else None,
    )


def summarize_folders(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the flat numbers of each run in ``folders``; raises ReportError."""
    return [summarize(run).flat() for run in load_runs(folders)]


def first_reaching(run: Run, accuracy: float) -> dict[str, Any] | None:
    """Return the first evaluation in which a run reached an accuracy, or None."""
    return next((row for row in run.of("eval") if row["accuracy"] >= accuracy), None)
