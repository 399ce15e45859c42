"""The report as one self-contained HTML file."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from gradwire.errors import BackendError
from gradwire.tools.report.load import ReportError, Run, load_runs
from gradwire.tools.report.summary import RunSummary, choice_details, coder_text, link_texts, summarize
from gradwire.tools.report.verdict import bytes_text, percent, seconds_text, verdicts

NONE = "–"


def write_report(folders: Iterable[Path], output: Path, predicted: Sequence[str] = ()) -> Path:
    """Write the page about ``folders`` to ``output`` and return its path.

    Args:
        predicted: Paragraphs that predict the same training over a network, below what was measured.

    Raises:
        ReportError: a run folder is corrupt, or the page cannot be written.
        BackendError: jinja2 or matplotlib is missing.
    """
    if output.is_dir():
        raise ReportError(f"{output} is a folder: name the page, such as {output / 'report.html'}")
    left_out: list[str] = []
    runs = load_runs(folders, left_out.append)
    page = render(runs, left_out, predicted)
    # A link stays one. Two processes may write the page at once.
    target = Path(os.path.realpath(output))
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        # A device or a pipe, such as /dev/stdout, is written to: a file would take its place.
        replaced = target.is_file() or not output.exists()
        # The name of a folder may hold bytes that are no text.
        (temporary if replaced else output).write_text(page, encoding="utf-8", errors="backslashreplace")
        if replaced:
            os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ReportError(f"cannot write {output}: {error.strerror or error}; choose another place") from error
    return output


def render(runs: Sequence[Run], remarks: Sequence[str] = (), predicted: Sequence[str] = ()) -> str:
    """Return the page's HTML, with remarks above the table and predictions below the verdicts; all text is escaped."""
    try:
        import jinja2
        from markupsafe import Markup

        from gradwire.tools.report.panels import gauge_panels, line_sample, progress_panels
    except ImportError as error:
        raise BackendError('reports need jinja2 and matplotlib: pip install "gradwire[cli]"') from error
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(resources.files(__package__).joinpath("page.html.j2").read_text("utf-8"))
    tasks = sorted({run.config["task"] for run in runs})
    notes = [f"{run.label}: {note}." for run in runs for note in (*run.notes, *link_texts(summarize(run).flat()))]
    return template.render(
        title=f"gradwire: {', '.join(tasks)}",
        subtitle=_subtitle(runs),
        notes=[*(f"{remark}." for remark in remarks), *notes],
        table=[_table_row(run, summarize(run)) for run in runs],
        verdicts=verdicts(runs),
        predicted=predicted,
        legend=[(Markup(line_sample(index)), run.label) for index, run in enumerate(runs)],
        progress=[*map(Markup, progress_panels(runs))],
        gauges=[*map(Markup, gauge_panels(runs))],
        evaluated_on="; ".join(sorted({str(run.config.get("evaluated_on", NONE)) for run in runs})),
        percentile_note=_percentile_note(runs),
        facts=_facts(runs),
    )


def _subtitle(runs: Sequence[Run]) -> str:
    started = min(str(run.config["started"]) for run in runs)
    workers = sorted({run.config["world_size"] for run in runs})
    kinds = {bool(run.config["simulated"]) for run in runs}
    kind = "simulated workers" if kinds == {True} else "workers" if kinds == {False} else "real and simulated workers"
    return f"{' and '.join(map(str, workers))} {kind}, begun {started.replace('T', ' ')}"


def _percentile_note(runs: Sequence[Run]) -> str:
    every = sorted({run.config["plan"].get("log_every", 1) for run in runs})
    note = "of single steps" if every == [1] else f"of medians over {' or '.join(map(str, every))} steps"
    seldom = "; with local steps the mean of all steps, since most of them exchange nothing"
    return note + (seldom if any(run.exchanges_seldom for run in runs) else "")


def _table_row(run: Run, numbers: RunSummary) -> dict[str, str]:
    def shown(value: float | None, form: str) -> str:
        return NONE if value is None else form.format(value)

    timed = numbers.step_time_s is not None
    low, high = numbers.step_time_p20_s or 0.0, numbers.step_time_p80_s or 0.0
    spread = "mean" if run.exchanges_seldom else f"{seconds_text(low)} to {seconds_text(high)}"
    return {
        "label": run.label,
        "final_accuracy": NONE if numbers.final_accuracy is None else percent(numbers.final_accuracy),
        "best_accuracy": NONE if numbers.best_accuracy is None else percent(numbers.best_accuracy),
        "best_step": "" if numbers.best_accuracy_step is None else f"step {numbers.best_accuracy_step}",
        "final_loss": shown(numbers.final_loss, "{:.4f}"),
        "step_time": seconds_text(numbers.step_time_s or 0.0) if timed else NONE,
        "step_range": spread if timed else "",
        "elapsed": seconds_text(numbers.elapsed_s),
        "sent": bytes_text(numbers.sent_bytes),
        "factor": shown(numbers.compression_factor, "{:.2f}"),
        "bits": shown(numbers.bits_per_element, "{:.2f}"),
    }


def _facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return hardware, versions and settings as pairs; a value that all runs share appears once."""
    facts: list[tuple[str, str]] = []

    def add(name: str, values: Sequence[Any]) -> None:
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        if len(set(texts)) == 1:
            facts.append((name, texts[0]))
        else:
            facts.extend((f"{name} ({run.label})", text) for run, text in zip(runs, texts))

    hardware = [run.config["hardware"] for run in runs]
    add("processor", [f"{h.get('processor')}, {h.get('cores')} cores" for h in hardware])
    add("system", [str(h.get("system")) for h in hardware])
    add("versions", [", ".join(f"{k} {v}" for k, v in run.config["versions"].items()) for run in runs])
    add("seed", [run.config["seed"] for run in runs])
    add("workers", [run.config["world_size"] for run in runs])
    add("begun", [run.config["started"] for run in runs])
    add("settings", [_pairs(run.config["plan"].get("settings", {})) for run in runs])
    if any(run.config.get("lab") for run in runs):
        add("emulated cluster", [str(run.config.get("lab") or NONE) for run in runs])
        add("interfaces counted", [_interfaces(run.config.get("interfaces")) for run in runs])
    links = [run.config.get("link") or {} for run in runs]
    told_apart = ("choice", "coder", "fallback")
    add("link", [_pairs({k: v for k, v in link.items() if k not in told_apart}) for link in links])
    if any(link.get("coder") for link in links):
        add("entropy coder", [coder_text(link["coder"]) if link.get("coder") else NONE for link in links])
    if any(link.get("choice") for link in links):
        add("choice", [choice_details(link["choice"]) if link.get("choice") else NONE for link in links])
    for name in dict.fromkeys(name for run in runs for name in run.gauges):
        add(name, [_gauge_text(run, name) for run in runs])
    add("method", [str(run.config["method"]) for run in runs])
    add("run folder", [str(run.path) for run in runs])
    return facts


def _gauge_text(run: Run, name: str) -> str:
    """Describe one gauge of a run in one line."""
    rows = run.gauge(name)
    if not rows:
        return NONE
    means = [mean for _, mean, _ in rows]
    spread = statistics.fmean(deviation for *_, deviation in rows)
    return (
        f"{statistics.fmean(means):.4g} on average, {min(means):.4g} to {max(means):.4g} from row to row, deviation "
        f"{spread:.3g} between steps and workers of a row"
    )


def _interfaces(counted: Sequence[dict[str, int]] | None) -> str:
    """Describe in one line the bytes that the hosts' interfaces counted."""
    if not counted:
        return NONE
    sent = [row["sent_payload_bytes"] for row in counted]
    low, high = bytes_text(min(sent)), bytes_text(max(sent))
    each = low if low == high else f"{low} to {high}"
    return f"{each} sent by each host, start-up and evaluations included, packets' headers not"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in values.items() if value is not None) or NONE
