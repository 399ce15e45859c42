"""The report: right numbers, honest words, one page that needs nothing, and clear refusals."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fake_runs import write_run
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gradwire.exchange.method import SEED_BITS
from gradwire.tools.report import ReportError, load_runs, summarize, write_report
from gradwire.tools.report.page import render
from gradwire.tools.report.panels import scale_bytes
from gradwire.tools.report.verdict import bytes_text, rate_text, seconds_text, verdict, verdicts

TERNGRAD = "TernGrad(clip=2.5)"


def paragraph(tmp_path: Path, **changes: object) -> str:
    base = write_run(tmp_path / "fp32")
    options: dict[str, object] = {"name": "terngrad", "sent_bytes": 250, **changes}
    other = write_run(tmp_path / "terngrad", TERNGRAD, **options)  # type: ignore[arg-type]
    ((label, text),) = verdicts(load_runs([base, other]))
    assert label.startswith("terngrad")
    return text


def test_numbers_of_a_run(tmp_path: Path) -> None:
    (run,) = load_runs([write_run(tmp_path / "a", accuracies=(0.1, 0.95, 0.9, 0.92), sent_bytes=1500)])
    numbers = summarize(run)
    assert (numbers.steps, numbers.final_accuracy, numbers.best_accuracy, numbers.best_accuracy_step) == (
        30,
        0.92,
        0.95,
        10,
    )
    assert numbers.sent_bytes == 4500
    assert numbers.compression_factor == 2.0
    assert numbers.bits_per_element == 16.0
    assert numbers.step_time_s == pytest.approx(0.012)
    assert numbers.step_time_p20_s == pytest.approx(0.0114)
    assert numbers.step_time_p80_s == pytest.approx(0.0126)


def test_it_paid_when_the_accuracy_came_sooner(tmp_path: Path) -> None:
    text = paragraph(tmp_path, step_time_s=0.005)
    assert "12.0 times less, 2.67 bits per element" in text
    assert "It paid: the same accuracy in 0.50 of the time." in text


def test_it_did_not_pay_when_steps_took_longer(tmp_path: Path) -> None:
    text = paragraph(tmp_path, step_time_s=0.015)
    assert "A step took 17.2 ms against fp32's 11.5 ms (medians): 1.50 times as long." in text
    assert "It did not pay in time here: 1.50 times as long to the same accuracy." in text


def test_it_did_not_pay_when_the_accuracy_was_not_reached(tmp_path: Path) -> None:
    text = paragraph(tmp_path, step_time_s=0.005, accuracies=(0.1, 0.85, 0.7))
    assert "did not reach fp32's final accuracy of 90.00 %: its best was 85.00 %, at step 10" in text
    assert "it did not pay here" in text
    assert "It paid" not in text


@pytest.mark.parametrize(("final", "advised"), [(0.88, True), (0.895, False)])
def test_a_method_that_forgets_and_falls_behind_gets_a_hint(tmp_path: Path, final: float, advised: bool) -> None:
    base = write_run(tmp_path / "a")
    kept = {"with_feedback": "ErrorFeedback(compressor=TopK(density=0.01))"}
    other = write_run(tmp_path / "b", "TopK(density=0.01)", name="other", accuracies=(0.1, final, final), **kept)
    runs = load_runs([base, other])
    assert ("try ErrorFeedback(compressor=TopK(density=0.01))" in verdict(runs[1], runs[0])) == advised


def test_a_method_that_forgets_nothing_gets_no_hint(tmp_path: Path) -> None:
    base = write_run(tmp_path / "a")
    other = write_run(tmp_path / "b", "TernGrad()", name="other", accuracies=(0.1, 0.5, 0.5), with_feedback=None)
    runs = load_runs([base, other])
    assert "forgets the rest" not in verdict(runs[1], runs[0])


def test_equal_times_claim_nothing(tmp_path: Path) -> None:
    assert "It saved bytes but no time here." in paragraph(tmp_path, step_time_s=0.0101)


def test_more_bytes_than_float32_are_called_more(tmp_path: Path) -> None:
    assert "sends 6 kB: more, " in paragraph(tmp_path, sent_bytes=4000)


def test_bytes_without_a_dense_equivalent_are_not_called_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "b", TERNGRAD, name="alone at last", sent_bytes=250)
    rows = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(re.sub(r'"dense_bytes": \d+', '"dense_bytes": 0', rows))
    runs = load_runs([write_run(tmp_path / "a"), folder])
    assert verdict(runs[1], runs[0]).startswith("Each worker sent 500 B. ")


@pytest.mark.parametrize(
    ("step_time_s", "end"),
    [
        (0.0101, "It saved neither bytes nor time here."),
        (0.015, "It did not pay in time here: 1.50 times as long to the same accuracy."),
    ],
)
@pytest.mark.parametrize("sent_bytes", [3000, 4000])
def test_bytes_that_are_not_fewer_are_not_called_saved(
    tmp_path: Path, sent_bytes: int, step_time_s: float, end: str
) -> None:
    assert paragraph(tmp_path, sent_bytes=sent_bytes, step_time_s=step_time_s).endswith(end)


def test_simulated_times_are_not_compared(tmp_path: Path) -> None:
    base = write_run(tmp_path / "a", simulated=True)
    other = write_run(tmp_path / "b", TERNGRAD, name="terngrad", simulated=True)
    runs = load_runs([base, other])
    text = verdict(runs[1], runs[0])
    assert "say nothing about a network" in text
    assert "times as long" not in text
    write_report([base, other], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "seconds of training" not in page
    assert "--columns: 2" in page


@pytest.mark.parametrize("change", [{"seed": 1}, {"world_size": 2}, {"task": "text"}, {"simulated": True}])
def test_runs_that_differ_are_not_compared(tmp_path: Path, change: dict[str, object]) -> None:
    text = paragraph(tmp_path, **change)
    assert "No fp32 run of the same task, seed and workers" in text


def test_a_seed_is_as_long_as_a_link_takes_it(tmp_path: Path) -> None:
    largest = (1 << SEED_BITS) - 1
    assert summarize(*load_runs([write_run(tmp_path / "a", seed=largest)])).seed == largest
    with pytest.raises(ReportError, match="seed is wrong"):
        load_runs([write_run(tmp_path / "b", seed=largest + 1)])


def test_labels_are_distinct_and_say_what_differs(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    assert [run.label for run in load_runs(folders)] == ["fp32, seed 0", "fp32, seed 1"]
    again = write_run(tmp_path / "again", seed=1)
    assert [run.label for run in load_runs([*folders, again])][-1] == "fp32, seed 1 #2"
    assert len(load_runs([folders[0], folders[0]])) == 1


class Parser(HTMLParser):
    """Collects tags and what they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_the_page_is_whole_escaped_and_self_contained(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", "<script>alert(1)</script>", name="<b>x</b>")]
    page = write_report(folders, tmp_path / "page.html", ["Predicted: a < b."]).read_text()
    parser = Parser()
    parser.feed(page)
    assert parser.tags.count("svg") == 6 + len(folders), "panels, and samples of lines in the legend"
    assert "<p>Predicted: a &lt; b.</p>" in page
    assert not {"script", "link", "img", "iframe"} & set(parser.tags)
    assert all(reference.startswith("#") for reference in parser.references)
    assert not re.search(r"url\((?!#)|@import|<!DOCTYPE svg", page)
    assert "&lt;b&gt;x&lt;/b&gt;" in page
    assert "a &lt;fast&gt; one" in page
    for word in ("90.00 %", "torch 2.13.0", "begun", "seed", "20th to 80th percentile"):
        assert word in page
    assert not list(tmp_path.glob("*.tmp"))


def test_a_page_that_another_process_writes_at_once_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, output, replace = write_run(tmp_path / "a"), tmp_path / "page.html", os.replace

    def beside(temporary: Path, to: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(os, "getpid", lambda: -1)
        write_report([run], output)
        replace(temporary, to)

    monkeypatch.setattr(os, "replace", beside)
    assert "90.00 %" in write_report([run], output).read_text()
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("accuracies", [(0.1, 0.5), (0.1,)])
def test_a_run_that_sent_nothing_has_no_plot_of_bytes(tmp_path: Path, accuracies: tuple[float, ...]) -> None:
    page = write_report([write_run(tmp_path / "a", accuracies=accuracies, sent_bytes=0)], tmp_path / "page.html")
    assert "<svg" in page.read_text()


def test_a_cut_off_last_row_is_tolerated_and_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-20])
    (run,) = load_runs([folder])
    assert len(run.rows) == 4
    assert "cut off" in run.notes[0]
    assert "cut off" in write_report([folder], tmp_path / "page.html").read_text()


def test_a_run_that_ended_early_is_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", plan={"settings": {"steps": 500}})
    assert load_runs([folder])[0].notes == ("the run ended after 20 of 500 steps",)


def test_corrupt_folders_are_refused_with_file_and_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    config, metrics = folder / "config.json", folder / "metrics.jsonl"
    whole = metrics.read_text()
    cases = {
        "line 2 is corrupt": whole.replace('{"step": 10', "{step: 10", 1),
        "line 2 is not a row of metrics: loss": whole.replace('"train", "loss"', '"train", "lost"', 1),
        "holds no whole row": "",
    }
    for message, text in cases.items():
        metrics.write_text(text)
        with pytest.raises(ReportError, match=message):
            load_runs([folder])
    metrics.unlink()
    with pytest.raises(ReportError, match="has the run begun"):
        load_runs([folder])
    metrics.write_text(whole)
    config.write_text(json.dumps({**json.loads(config.read_text()), "gradwire_run": 9}))
    with pytest.raises(ReportError, match="another version of gradwire"):
        load_runs([folder])
    config.write_text('{"method": "x"}')
    with pytest.raises(ReportError, match="lacks task"):
        load_runs([folder])
    config.write_text('{"method"')
    with pytest.raises(ReportError, match="is corrupt"):
        load_runs([folder])
    config.unlink()
    with pytest.raises(ReportError, match=r"holds no config\.json"):
        load_runs([folder])
    with pytest.raises(ReportError, match="is not a folder"):
        load_runs([tmp_path / "nowhere"])
    (folder / "compare.json").write_text("{}")
    with pytest.raises(ReportError, match="no run has begun"):
        load_runs([folder])


def test_a_comparison_stands_for_its_runs_in_the_order_they_began(tmp_path: Path) -> None:
    write_run(tmp_path / "b", started="2026-01-01T00:00:00+00:00")
    write_run(tmp_path / "a", TERNGRAD, name="terngrad")
    (tmp_path / "compare.json").write_text("{}")
    assert [run.label for run in load_runs([tmp_path])] == ["fp32", "terngrad"]


def test_units() -> None:
    assert [bytes_text(count) for count in (12, 1234, 12_438_000, 2.5e9)] == ["12 B", "1.23 kB", "12.4 MB", "2.5 GB"]
    assert [seconds_text(s) for s in (0.00123, 0.5, 1.5, 600)] == ["1.23 ms", "500 ms", "1.5 s", "10 min"]
    assert [seconds_text(60 * minutes) for minutes in (999, 999.6, 1230)] == ["999 min", "16.7 h", "20.5 h"]
    rates = [rate_text(rate) for rate in (None, 2.5e9, 1e8, 8e3, 10.0)]
    assert rates == ["unlimited", "2.5 Gbit/s", "100 Mbit/s", "8 kbit/s", "10 bit/s"]


@pytest.mark.parametrize(("low", "high"), [(3.1, 3.9), (0.9, 4.2), (1, 60), (0.3, 90), (0.02, 800), (1e-3, 5e4)])
def test_the_numbers_of_the_axis_of_bytes_stand_clear_of_each_other(low: float, high: float) -> None:
    figure = Figure(figsize=(7.4, 2.75), layout="constrained")
    axes = figure.subplots(1, 2)[0]
    axes.plot([low, high], [0, 1])
    scale_bytes(axes)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    left, right = sorted(axes.get_xlim())
    ticks = [
        tick
        for minor in (False, True)
        for tick in zip(axes.xaxis.get_ticklocs(minor=minor), axes.xaxis.get_ticklabels(minor=minor))
    ]
    boxes = sorted(
        (box.x0, box.x1)
        for value, label in ticks
        if left <= value <= right and label.get_text()
        for box in [label.get_window_extent()]
    )
    assert len(boxes) >= 2
    assert all(before[1] < after[0] for before, after in itertools.pairwise(boxes))


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="cannot write"):
        write_report([write_run(tmp_path / "a")], tmp_path / "no" / "page.html")
    with pytest.raises(ReportError, match=r"cannot write .*: Not a directory"):
        write_report([tmp_path / "a"], tmp_path / "a" / "config.json" / "page.html")


def test_a_page_goes_where_a_link_leads_and_into_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.tools.report.page.render", lambda *parts: "a page")
    run, link, pipe = write_run(tmp_path / "a"), tmp_path / "link.html", tmp_path / "pipe"
    link.symlink_to("page.html")
    for _ in range(2):
        assert write_report([run], link).is_symlink()
        assert (tmp_path / "page.html").read_text() == "a page"
    os.mkfifo(pipe)
    with os.fdopen(os.open(pipe, os.O_RDWR), "rb", buffering=0) as kept:
        assert write_report([run], pipe).is_fifo()
        assert kept.read(10) == b"a page"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "link.html", "page.html", "pipe"}


def test_a_page_names_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / os.fsdecode(b"run\xff"))
    assert r"run\udcff" in write_report([folder], tmp_path / "page.html").read_text("utf-8")


def test_reading_runs_needs_no_matplotlib() -> None:
    code = "import sys, gradwire.tools.report; sys.exit('matplotlib' in sys.modules or 'jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_one_json_row_a_line_is_what_the_fixture_writes(tmp_path: Path) -> None:
    lines = (write_run(tmp_path / "a") / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["eval", "train", "eval", "train", "eval"]


CHOICE = {
    "chosen": "bf16",
    "reason": "the fastest of 2 in 4 turns of 3 steps",
    "step_s": {"fp32": 0.02, "bf16": 0.0123},
    "left_out": {"terngrad": "not tried: too many bytes"},
}


def test_the_coder_that_ran_and_why_is_among_the_facts(tmp_path: Path) -> None:
    times = {"rans": 0.0022, "huffman": 0.0005}
    coder = {
        "chosen": "huffman",
        "reason": "the least time",
        "encode_decode_s": times,
        "variants": {"decode": "scalar"},
    }
    ended = write_run(tmp_path / "a", "Coded()", name="coded", link={"backend": "cpu", "coder": coder})
    other = write_run(tmp_path / "b", "TernGrad()", name="terngrad", seed=1, link={"backend": "cpu", "coder": None})
    text = write_report([ended, other], tmp_path / "page.html").read_text()
    assert "huffman (the least time): rans 2.2 ms, huffman 0.5 ms" in text
    assert "encode_decode_s" not in text


def test_what_methods_report_is_shown_and_described(tmp_path: Path) -> None:
    plain, telling = write_run(tmp_path / "a"), write_run(tmp_path / "b", name="cat", gauges=("elements",))
    page = render(load_runs([plain, telling]))
    assert "What the methods report" in page
    assert 'aria-label="elements by step"' in page
    assert "0.375 on average, 0.25 to 0.5 from row to row, deviation 0.125 between steps" in page
    assert "<dt>elements (fp32)</dt><dd>–</dd>" in page
    assert "What the methods report" not in render(load_runs([plain]))


@pytest.mark.parametrize("gauges", [3, {"elements": 3}, {"elements": {"mean": 1.0}}, {"elements": {"mean": "1"}}])
def test_gauges_that_are_none_are_refused(tmp_path: Path, gauges: object) -> None:
    folder = write_run(tmp_path / "a")
    first, *_ = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(json.dumps({**json.loads(first), "gauges": gauges}) + "\n")
    with pytest.raises(ReportError, match="line 1 is not a row of metrics: gauges are wrong"):
        load_runs([folder])


def test_what_auto_took_is_said_and_a_trial_that_did_not_end_too(tmp_path: Path) -> None:
    ended = write_run(tmp_path / "a", "Auto()", name="auto", link={"backend": "cpu", "choice": CHOICE})
    open_choice = {"chosen": None, "reason": "the trial still runs", "step_s": {}, "left_out": {}}
    running = write_run(tmp_path / "b", "Auto()", name="auto", seed=1, link={"choice": open_choice})
    plain = write_run(tmp_path / "c")
    numbers = [summarize(run) for run in load_runs([ended, running, plain])]
    assert [n.chosen_method for n in numbers] == ["bf16", None, None]
    assert [n.choice_reason for n in numbers] == [CHOICE["reason"], "the trial still runs", None]
    page = write_report([ended, running, plain], tmp_path / "page.html").read_text()
    assert "auto took bf16 (the fastest of 2 in 4 turns of 3 steps); a step took fp32 20 ms, bf16 12.3 ms" in page
    assert "terngrad was not tried: too many bytes" in page
    assert "auto had not chosen yet" in page
    assert "chosen&#39;" not in page
