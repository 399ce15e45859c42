"""Sections of ``docs/benchmarks.md``: emulated links beside what they should be, and steps on long ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.lib.page_parts import ms, provenance, where
from benchmarks.lib.results import result, rows_of
from gradwire.tools.bench.pace import settling_s
from gradwire.tools.lab import Topology, format_rate


def link_of(spec: str) -> str:
    """Describe a link by its rate, delay and loss."""
    topology = Topology.parse(spec)
    link = topology.of_host(0)
    parts = [format_rate(topology.bandwidth), f"{1e3 * link.delay_s:g} ms"]
    parts += [f"{100 * link.loss:g} % lost"] if link.loss else []
    return ", ".join([*parts, topology.congestion] if topology.congestion else parts)


def rate_of(found: dict[str, Any]) -> str:
    """Write a throughput with its range, and what it should be."""
    mbit = {name: found[name] / 1e6 for name in ("bits_per_s", "slowest", "fastest")}
    return f"{mbit['bits_per_s']:.3g} ({mbit['slowest']:.3g} - {mbit['fastest']:.3g})"


def theory_of(found: dict[str, Any]) -> str:
    """Write the throughput that is expected, if there is a formula."""
    bits = found["expected_bits_per_s"]
    return "-" if bits is None else f"{bits / 1e6:.3g}"


def network_section() -> list[str]:
    """Describe round trips and throughput of emulated links, and the limit of what emulates them."""
    found = result("speed/lab_network")
    if not found:
        return []
    first = found["rows"][0]
    lines = [
        "## Emulated links",
        "",
        '`sudo env "PATH=$PATH" python benchmarks/speed/lab_network.py` measured two hosts of `gradwire lab`. Delays are one way, so a round trip of one datagram should'
        f" take two delays. Throughput is in Mbit/s, the median of windows of {found['window_s']:g} s, with their range in brackets. Without losses, the expected throughput"
        " is the rate less the headers, 1448 of the 1514 bytes of a frame. With losses, it is the throughput that CUBIC's average window allows (RFC 9438,"
        " 5.1; its Reno-friendly region is the formula of Mathis et al.). These formulae assume that a connection loses packets now and then; they"
        " ignore slow start after time-outs and the loss of acknowledgements. There is no such formula for BBR. TCP's buffers are"
        f" `tcp_rmem` {first['tcp_rmem']} and `tcp_wmem` {first['tcp_wmem']}. Frames were moved by: {first['emulator']}. {where(found)}.",
        "",
        "| link | congestion control | two delays, ms | round trip: least, median, 95 %, ms | one connection | expected | eight connections | expected |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        one, eight = row["connections_1"], row["connections_8"]
        names = ("least_round_trip_s", "round_trip_s", "percentile_95_round_trip_s")
        trips = ", ".join(f"{1e3 * row[name]:.2f}" for name in names)
        lines.append(
            f"| {link_of(row['lab'])} | {row['tcp_congestion_control']} | {1e3 * row['two_delays_s']:g} | {trips} | {rate_of(one)}"
            f" | {theory_of(one)} | {rate_of(eight)} | {theory_of(eight)} |"
        )
    limited = [
        f"{link_of(row['lab'])}, {row['tcp_congestion_control']}, {name[12:]} connections: {'; '.join(row[name]['relay_limits'])}"
        for row in found["rows"]
        for name in ("connections_1", "connections_8")
        if row[name].get("relay_limits")
    ]
    lines += [
        "",
        f"Rows in which the relay itself was a limit: {'. '.join(limited) if limited else 'none'}.",
        "",
        "The next table shows the relay's own limit, on links without a rate, with eight connections on the same cores as the relay.",
        "",
        "| frames | Gbit/s | frames a second | of a core | it says |",
        "|---|---:|---:|---:|---|",
    ]
    for row in found["limits"]:
        lines.append(
            f"| {row['frames']} | {row['bits_per_s'] / 1e9:.2f} ({row['slowest'] / 1e9:.2f} - {row['fastest'] / 1e9:.2f})"
            f" | {row['frames_per_s']:,.0f} | {100 * row['relay_busy']:.0f} % | {'; '.join(row['relay_limits']) or 'no limit'} |"
        )
    return [*lines, ""]


def messages_section() -> list[str]:
    """Describe how long messages take over one connection, by congestion control, losses and rests."""
    found = result("speed/lossy_messages")
    if not found:
        return []
    cells: dict[tuple[str, str, float], dict[int, dict[str, Any]]] = {}
    for row in found["rows"]:
        cells.setdefault((row["lab"], row["setup"], row["pause_s"]), {})[row["size_bytes"]] = row
    sizes = list(next(iter(cells.values())))
    lines = [
        "### One message, by congestion control",
        "",
        '`sudo env "PATH=$PATH" python benchmarks/speed/lossy_messages.py` sent messages over one connection that stays open, and rested after the answer to each. The table'
        " shows milliseconds until the answer, which needs a round trip: the mean, and in brackets the quartiles.",
        "",
        "- CUBIC shrinks its window at each loss and opens it again slowly. After a rest of more than TCP's timeout, 0.2 s and a round trip, it halves the window"
        " for each timeout, down to ten packets, which costs the next message round trips. With *windows kept* (`net.ipv4.tcp_slow_start_after_idle=0`) it does not.",
        "- BBR keeps its rate, however long it rests, and losses hardly slow a long message down. But it sends no faster than the rate that it has measured, and a connection that rests"
        " between messages never measures more than a message in a round trip. So it spreads a small message over 0.46 round trips. With the *bandwidth shown*, by"
        f" {found['shown_bytes'] / 2**20:g} MiB of messages at once before the first, it does not. Losses undo that for small messages, since the rate at which a lost packet is"
        " sent again counts as measured. gradwire does not show it: hosts that do so at the same time show BBR a share of the bandwidth, and then it can keep to that share"
        " when a host sends alone.",
        "",
        f"The performance model has the losses and the 0.46 round trips (`gradwire plan --congestion`), but not the rests. {where(found)}.",
        "",
        f"| link | congestion control | rest | {' | '.join(f'{size:,} bytes' for size in sizes)} |",
        f"|---|---|---|{'---:|' * len(sizes)}",
    ]
    for (lab, setup, pause_s), cell in cells.items():
        times = [f"{ms(r['mean_s'])} ({ms(r['quartiles_s'][0])} - {ms(r['quartiles_s'][1])})" for r in cell.values()]
        name = link_of(lab).removesuffix(f", {setup.split(',')[0]}")
        lines.append(f"| {name} | {setup} | {1e3 * pause_s:g} ms | {' | '.join(times)} |")
    return [*lines, "", *_settled()]


def _settled() -> list[str]:
    """Describe how long messages take under CUBIC before and after the window has settled."""
    found = result("speed/settling")
    if not found:
        return []
    lines = [
        '`sudo env "PATH=$PATH" python benchmarks/speed/settling.py` sent messages for longer, under CUBIC. The table shows the mean milliseconds of those that began in the first'
        f" {found['first_s']:g} s, and of those after ten losses of a connection that sends all the time (*settling*). *Predicted* is a round trip and the bytes at the rate of the performance"
        f" model. {where(found)}.",
        "",
        "| link | bytes | at first | settling, s | settled | messages | predicted |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        lines.append(
            f"| {link_of(row['lab'])} | {row['size_bytes']:,} | {ms(row['first_mean_s'])} | {row['settling_s']:.1f} | {ms(row['settled_mean_s'])} |"
            f" {row['settled_messages']} | {ms(row['predicted_s'])} |"
        )
    return [*lines, ""]


def long_links_section() -> list[str]:
    """Describe the steps that were measured on links with delay or loss."""
    rows = rows_of("speed/step_long_links")
    if not rows:
        return []
    exchanges = list(dict.fromkeys(row["variant"] for row in rows))
    own = [row for row in rows if Topology.parse(row["lab"]).congestion is None]
    controls = ", ".join(dict.fromkeys(row["tcp_congestion_control"] for row in own))
    limited = [
        f"{row['model']} on {row['hosts']} hosts, {link_of(row['lab'])}, {row['variant']}: {row['relay_limits']}"
        for row in rows
        if row["relay_limits"]
    ]
    lines = [
        "## Steps on long links",
        "",
        f"`python benchmarks/speed/long_links.py` measured {len(_cells(rows))} cells, each by one `gradwire bench step --delay ... --loss ...` whose exchanges take turns."
        " The table shows milliseconds per step: the median, and in brackets the percentiles 20 and 80. Delays are one way. In each turn of an"
        " exchange, up to three steps at the beginning are not counted, since TCP starts slowly after the turns of the others. Where frames are lost under CUBIC, each exchange first"
        f" takes steps for {_settling(rows)} s, until ten losses have given its connections' windows their mean (`src/gradwire/tools/bench/pace.py`). `compute` exchanges nothing."
        f" The exchange that takes the least time is in bold. TCP's congestion control is {controls} unless the link names another. `benchmarks/results/speed/step_long_links.jsonl` has the"
        f" rows with floors, bytes and the segments that TCP sent again. {provenance(rows[0])}.",
        "",
        f"| model | hosts | link | {' | '.join(exchanges)} |",
        f"|---|---:|---|{'---:|' * len(exchanges)}",
    ]
    for (model, hosts, lab), cell in _cells(rows).items():
        fastest = min((row for name, row in cell.items() if name != "compute"), key=lambda row: row["step_time_s"])
        shown = [_step(cell.get(name), cell.get(name) is fastest) for name in exchanges]
        lines.append(f"| {model} | {hosts} | {link_of(lab)} | {' | '.join(shown)} |")
    limits = f"Steps in which the relay was a limit: {'. '.join(limited) if limited else 'none'}."
    return [*lines, "", limits, "", *_predicted()]


def _settling(rows: Sequence[dict[str, Any]]) -> str:
    """Write the range of seconds in which windows settled."""
    found = [settling_s(Topology.parse(row["lab"]).links(), row["tcp_congestion_control"]) for row in rows]
    return f"{min(s for s in found if s):.0f} to {max(found):.0f}"


def _cells(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, int, str], dict[str, dict[str, Any]]]:
    """Return the rows of each cell by their exchange."""
    found: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["model"], row["hosts"], row["lab"]), {})[row["variant"]] = row
    return found


def _step(row: dict[str, Any] | None, bold: bool) -> str:
    """Write a step's time with its range."""
    if row is None:
        return "-"
    time = f"**{ms(row['step_time_s'])}**" if bold else ms(row["step_time_s"])
    return f"{time} ({ms(row['percentile_20_s'])} - {ms(row['percentile_80_s'])})"


def _predicted() -> list[str]:
    """Describe what the performance model says of these steps."""
    found = result("speed/predictions_long_links")
    if found is None:
        return []
    told = found["summary"]
    judged = [row for row in found["rows"] if row["role"] == "judged"]
    exchanges = list(dict.fromkeys(row["variant"] for row in judged))
    lines = [
        "`python benchmarks/speed/predictions.py --rows benchmarks/results/speed/step_long_links.jsonl` calibrates the model on every"
        f" third cell and judges it on the others: its predictions of {told['judged_steps']} steps are off by {100 * told['median_absolute_error']:.0f} % in the"
        f" median, {100 * told['percentile_90_absolute_error']:.0f} % at the 90th percentile, and {100 * told['worst_absolute_error']:.0f} % at"
        f" most. {_advised(told)} Where frames are lost, a step is judged by its mean. The table shows the predicted step, in milliseconds, and its error.",
        "",
        f"| model | hosts | link | {' | '.join(exchanges)} |",
        f"|---|---:|---|{'---:|' * len(exchanges)}",
    ]
    for (model, hosts, lab), cell in _cells(judged).items():
        shown = [
            f"{ms(cell[name]['predicted_s'])} ({100 * cell[name]['relative_error']:+.0f} %)" if name in cell else "-"
            for name in exchanges
        ]
        lines.append(f"| {model} | {hosts} | {link_of(lab)} | {' | '.join(shown)} |")
    return [*lines, "", "![Predicted beside measured steps on long links](figures/predicted_long_links.png)", ""]


def _advised(told: dict[str, Any]) -> str:
    """Say in how many clear cells the advice was right."""
    parts = [
        f"against {against} in {told[f'well_advised_against_{against}']} of {told[f'clear_cells_against_{against}']}"
        for against in ("DDP fp32", "the best cast")
    ]
    return f"Its advice on TernGrad is right {' and '.join(parts)} cells that differ by more than 5 %."
