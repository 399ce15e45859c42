"""What the figures show: each line's points, by the numbers that they are drawn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_runs import write_run
from matplotlib.figure import Figure

from gradwire.errors import IncompatibleError
from gradwire.tools.report import ReportError, load_runs
from gradwire.tools.report.figures import draw_scaling, draw_steps
from gradwire.tools.report.panels import AXES, draw, gauge_panels, lowest_accuracy, progress_panels, spans_decades


def test_a_figure_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"cannot write .*curve\.png: No such file or directory"):
        draw_scaling(tmp_path / "no" / "curve.png", [("1 Gbit/s", "ddp", n, float(n)) for n in (2, 8)])


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures that would have been written."""
    found: list[Figure] = []

    def savefig(figure: Figure, path: Any, **options: object) -> None:
        found.append(figure)
        if hasattr(path, "write"):
            path.write("<svg></svg>")

    monkeypatch.setattr(Figure, "savefig", savefig)
    return found


def lines(panel: Any) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each line that has a name, to nine decimals."""
    named = {str(line.get_label()): line for line in panel.get_lines() if not str(line.get_label()).startswith("_")}
    return {
        label: [(round(float(x), 9), round(float(y), 9)) for x, y in line.get_xydata()] for label, line in named.items()
    }


def step_row(
    variant: str, rate: float | None, step_s: float, model: str = "mlp", hosts: int = 4, links: str = ""
) -> dict[str, Any]:
    return {
        "model": model,
        "hosts": hosts,
        "lab": f"hosts={hosts},bandwidth={rate}{links}",
        "bandwidth_bits_per_s": rate,
        "variant": variant,
        "step_time_s": step_s,
    }


def test_speed_ups_are_ddps_time_over_the_exchanges_from_the_slowest_link_on(drawn: list[Figure]) -> None:
    rows = [
        step_row("ddp fp32", None, 0.1),
        step_row("gradwire terngrad", None, 0.2),
        step_row("compute", None, 0.05),
        step_row("ddp fp32", 1e8, 2.0),
        step_row("gradwire terngrad", 1e8, 0.5),
        step_row("ddp fp32", 1e9, 0.3),
        step_row("gradwire terngrad", 1e9, 0.2),
        step_row("gradwire bf16", 1e9, 0.25),
    ]
    draw_steps(Path("x.png"), rows)
    (panel,) = drawn[0].axes
    expected = {"gradwire terngrad": [(0, 4.0), (1, 1.5), (2, 0.5)], "gradwire bf16": [(1, 1.2)]}
    assert lines(panel) == expected, "DDP alone and computing have no line"
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["100 Mbit/s", "1 Gbit/s", "unlimited"]
    assert panel.get_title() == "mlp, 4 hosts"


def test_each_model_and_number_of_hosts_has_its_panel(drawn: list[Figure]) -> None:
    cells = [("mlp", 2), ("mlp", 4), ("lenet", 2)]
    rows = []
    for i, (model, hosts) in enumerate(cells):
        rows += [step_row(v, 1e9, s, model, hosts) for v, s in (("ddp fp32", 1.0), ("gradwire bf16", 1.0 / (2 + i)))]
    draw_steps(Path("x.png"), rows)
    found = {panel.get_title(): lines(panel)["gradwire bf16"] for panel in drawn[0].axes}
    assert found == {f"{model}, {hosts} hosts": [(0, pytest.approx(2 + i))] for i, (model, hosts) in enumerate(cells)}


def test_what_links_do_has_its_panel_and_is_in_its_title_where_it_differs(drawn: list[Figure]) -> None:
    links = {"": 2.0, ",delay=20ms": 3.0, ",delay=20ms,loss=1%": 4.0}
    rows = []
    for text, speedup in links.items():
        rows += [step_row(v, 1e9, s, links=text) for v, s in (("ddp fp32", 1.0), ("gradwire bf16", 1.0 / speedup))]
    lenet = [step_row(v, 1e9, 1.0, "lenet", links=",delay=20ms") for v in ("ddp fp32", "gradwire bf16")]
    draw_steps(Path("x.png"), rows + lenet)
    found = {panel.get_title(): lines(panel)["gradwire bf16"] for panel in drawn[0].axes}
    assert found == {
        "mlp, 4 hosts\nno delay, no loss": [(0, 2)],
        "mlp, 4 hosts\ndelay=20ms, no loss": [(0, pytest.approx(3))],
        "mlp, 4 hosts\ndelay=20ms, loss=1%": [(0, 4)],
        "lenet, 4 hosts": [(0, 1)],
    }


def test_nothing_to_compare_is_refused() -> None:
    for rows in ([step_row("ddp fp32", None, 1.0)], [step_row("gradwire bf16", None, 1.0)]):
        with pytest.raises(IncompatibleError, match="compares exchanges with 'ddp fp32'"):
            draw_steps(Path("x.png"), rows)


def test_throughput_is_drawn_against_workers_beside_what_is_linear(drawn: list[Figure]) -> None:
    points = [("1 Gbit/s", m, n, rate) for m, n, rate in (("ddp", 8, 30.0), ("ddp", 2, 10.0), ("bf16", 8, 60.0))]
    points += [("100 Mbit/s", "ddp", 2, 5.0), ("100 Mbit/s", "ddp", 8, 6.0), ("1 Gbit/s", "bf16", 2, 20.0)]
    draw_scaling(Path("x.png"), [*points, ("100 Mbit/s", "bf16", 2, 1.0), ("100 Mbit/s", "bf16", 8, 2.0)])
    left, right = drawn[0].axes
    assert (left.get_title(), right.get_title()) == ("1 Gbit/s", "100 Mbit/s")
    assert lines(left) == {"ddp": [(2, 10), (8, 30)], "bf16": [(2, 20), (8, 60)], "ddp, linear": [(2, 10), (8, 40)]}
    assert lines(right)["ddp"] == [(2, 5), (8, 6)]
    with pytest.raises(IncompatibleError, match="two numbers of workers"):
        draw_scaling(Path("x.png"), points[:1])


def test_progress_is_drawn_against_steps_seconds_and_megabytes(tmp_path: Path) -> None:
    (run,) = load_runs([write_run(tmp_path / "a", accuracies=(0.1, 0.8, 0.9), sent_bytes=2_000_000)])
    expected = {"step": [0, 10, 20], "seconds of training": [0.0, 0.1, 0.2], "MB sent by each worker": [0, 2, 4]}
    for name, horizontal in AXES:
        panel = Figure().subplots()
        draw(panel, [run], "accuracy", horizontal, log=False)
        (points,) = lines(panel).values()
        assert points == list(zip(expected.pop(name), (10.0, 80.0, 90.0)))
        panel = Figure().subplots()
        draw(panel, [run], "loss", horizontal, log=False)
        assert [y for _, y in lines(panel)["fp32"]] == pytest.approx([2.0, 1.0, 2 / 3])
        train = panel.get_lines()[0]
        assert list(train.get_ydata()) == pytest.approx([1.0, 2 / 3]), "training losses are drawn behind"
    assert not expected


def test_what_methods_report_is_drawn_by_step_with_a_band(tmp_path: Path, drawn: list[Figure]) -> None:
    runs = load_runs(
        [
            write_run(tmp_path / "a"),
            write_run(tmp_path / "b", name="sidco", gauges=("density",)),
            write_run(tmp_path / "c", name="cat", gauges=("elements", "density")),
        ]
    )
    assert not [*gauge_panels(runs[:1])]
    assert [text[:4] for text in gauge_panels(runs)] == ["<svg"] * 2
    density, elements = (panel for figure in drawn for panel in figure.axes)
    assert (density.get_ylabel(), elements.get_ylabel()) == ("density", "elements")
    assert lines(density) == {name: [(10, 0.25), (20, 0.5)] for name in ("sidco", "cat")}
    assert lines(elements) == {"cat": [(10, 0.25), (20, 0.5)]}
    (band,) = elements.collections
    low, high = (sorted({float(y) for x, y in band.get_paths()[0].vertices if x == at}) for at in (10, 20))
    assert (low, high) == ([0.125, 0.375], [0.375, 0.625])


def test_labels_are_drawn_as_they_are_written(tmp_path: Path) -> None:
    """Matplotlib reads what is between two dollar signs as a formula, which this is not."""
    name = "/data/$a_$/x"
    rows = [step_row(v, 1e9, 1.0, links=",x=$a_$") for v in ("ddp fp32", name)]
    draw_steps(tmp_path / "x.svg", [*rows, *(step_row(v, 1e9, 1.0) for v in ("ddp fp32", name))])
    assert name in (tmp_path / "x.svg").read_text(), "an SVG names its texts in comments"


def test_losses_of_all_axes_come_before_accuracies(tmp_path: Path, drawn: list[Figure]) -> None:
    """So that a page as wide as the axes has the losses above the accuracies."""
    runs = load_runs([write_run(tmp_path / name, name=name) for name in ("a", "b")])
    assert len([*progress_panels(runs)]) == 6
    shown = [(panel.get_ylabel(), panel.get_xlabel()) for figure in drawn for panel in figure.axes]
    axes = ["step", "seconds of training", "MB sent by each worker (logarithmic)"]
    assert shown == [(field, name) for field in ("loss", "accuracy, %") for name in axes]
    assert all(set(lines(panel)) == {"a", "b"} for figure in drawn for panel in figure.axes)
    drawn.clear()
    assert len([*progress_panels(load_runs([write_run(tmp_path / "s", simulated=True)]))]) == 4
    assert not any("seconds" in panel.get_xlabel() for figure in drawn for panel in figure.axes)


def test_on_a_logarithmic_axis_what_sent_nothing_yet_is_left_out(tmp_path: Path) -> None:
    (run,) = load_runs([write_run(tmp_path / "a", sent_bytes=1_000_000)])
    panel = Figure().subplots()
    draw(panel, [run], "accuracy", dict(AXES)["MB sent by each worker"], log=True)
    assert lines(panel)["fp32"] == [(1, 80.0), (2, 90.0)]


def test_the_axes_begin_where_four_times_the_worst_final_error_is_shown(tmp_path: Path) -> None:
    runs = load_runs([write_run(tmp_path / n, accuracies=(0.1, a), name=n) for n, a in (("a", 0.9), ("b", 0.95))])
    assert lowest_accuracy(runs) == pytest.approx(60.0)
    assert lowest_accuracy(runs[1:]) == pytest.approx(80.0)
    assert lowest_accuracy(load_runs([write_run(tmp_path / "c", accuracies=(0.1, 0.2))])) == 0.0
    exact = load_runs([write_run(tmp_path / "d", accuracies=(0.1, 1.0), name="d")])
    assert lowest_accuracy(exact) == 99.0
    assert not spans_decades(runs)
