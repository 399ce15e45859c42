"""The measured part of ``docs/publishing-weights.md``: bits, speed, files, freshness over links, and hostile patches."""

from __future__ import annotations

from statistics import median

from benchmarks.lib.page_parts import load, where
from benchmarks.lib.results import result

__all__ = ["measured"]


def measured() -> str:
    """Return the measured part of the page; a sentence where nothing has been measured."""
    parts = [
        line for part in (_bits(), _codes(), _speed(), _anchors(), _files(), _freshness(), _hostile()) for line in part
    ]
    return "\n".join(parts or ["Nothing has been measured yet."]).rstrip()


def _bits() -> list[str]:
    found = result("training/published_bits")
    if not found:
        return []
    rows = found["rows"]
    lines = [
        f"A character GPT of {rows[0]['elements'] / 1e6:.1f} M parameters, AdamW, published in bfloat16 after each step at several "
        f"learning rates, after {found['start_steps']} steps at 3e-4; means of {rows[0]['steps']} steps. The bound is the entropy of positions "
        "that fall anywhere with the same share, and of the distances; the second one is that of each tensor by itself. Files are "
        f"counted whole. `python benchmarks/training/published_bits.py`. {where(found)}.",
        "",
        "| learning rate | elements changed | by one unit | bound, bits a change | of each tensor | patch, bits a change | over the bound | bits an element |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['rate']:g} | {100 * row['share_changed']:.2f} % | {100 * row['share_by_one']:.1f} % | {row['bound_bits_per_change']:.2f} "
            f"| {row['bound_by_tensor_bits_per_change']:.2f} | {row['patch_bits_per_change']:.2f} | {100 * (row['patch_over_bound'] - 1):+.1f} % "
            f"| {row['patch_bits_per_element']:.3f} |"
        )
    return [*lines, ""]


def _codes() -> list[str]:
    found = result("training/published_bits")
    if not found:
        return []
    rows = found["rows"]
    names = list(rows[0]["codes"])
    lines = [
        "Bits a change of other codes on the same changes. PULSE is arXiv:2602.03839's coding as it is described there: positions of each tensor as "
        "differences in the smallest integer type, values as they are, then the compressor.",
        "",
        f"| code, at a learning rate of | {' | '.join(format(row['rate'], 'g') for row in rows)} |",
        f"|---|{'---:|' * len(rows)}",
        f"| patch | {' | '.join(format(row['patch_bits_per_change'], '.2f') for row in rows)} |",
    ]
    for name in names:
        lines.append(f"| {name} | {' | '.join(format(row['codes'][name], '.2f') for row in rows)} |")
    return [*lines, ""]


def _speed() -> list[str]:
    found = result("speed/publish_speed")
    if not found:
        return []
    smaller = result("speed/publish_speed_200m")
    rows = [*found["rows"], *(smaller["rows"] if smaller else ())]
    lines = [
        "Encoding and decoding on one thread beside a memcpy of the same bytes, bfloat16, changes by one unit at random: the processor's "
        f"time, the best of {found['turns']} turns taken side by side; medians are in the result. Encoding advances the publisher's copy. *In place*: all digests, that of the "
        "whole base among them, are compared before the first write, which takes two passes of memory. *Staged*: into the subscriber's own copy, "
        "verified when it was written, in one pass; digests are compared before the copy is handed over, and the swap, a memcpy, is not counted. "
        "*Sum*: all words of the reader's weights, as at the start of a subscriber. The bound is the entropy of positions and signs. `python benchmarks/speed/publish_speed.py`. "
        f"{where(found)}. {load(found)}",
        "",
        "| elements | changed | bits a change | over the bound | memcpy | encode, of memcpy's rate | decode in place | decode staged | sum | encode, s | in place, s | staged, s | peak memory |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        over = row["patch_bits_per_change"] / row["bound_bits_per_change"] - 1
        lines.append(
            f"| {row['elements'] / 1e6:,.0f} M | {100 * row['share_changed']:.1f} % | {row['patch_bits_per_change']:.2f} | {100 * over:+.1f} % "
            f"| {row['memcpy_bytes_per_s'] / 1e9:.1f} GB/s | {row['encode_rate_of_memcpy']:.2f} | {row['in_place_rate_of_memcpy']:.2f} "
            f"| {row['staged_rate_of_memcpy']:.2f} | {row['sum_in_place_rate_of_memcpy']:.2f} | {row['encode_s']:.2f} | {row['in_place_s']:.2f} | {row['staged_s']:.2f} "
            f"| {row['peak_bytes'] / 1e9:.1f} GB: weights of {row['weight_bytes'] / 1e9:.1f} GB, the publisher's copy, a reader's |"
        )
    return [*lines, ""]


def _anchors() -> list[str]:
    found = result("speed/anchor_speed")
    if not found:
        return []
    lines = [
        "Anchors, coded without loss, on one thread: bits a weight of the whole file, and bytes of weights a second. The GPT is the one above, untrained and trained at 3e-4; "
        "normal values have deviation 0.02; 8-bit floats are scaled to their largest value by tensor. *Coder*: into chunks with sums of words, and back into the weights with sums. *File*: with all BLAKE2b "
        "digests, into the subscriber's own copy. The processor's time, the best of all turns, beside a memcpy of the same bytes. `python benchmarks/speed/anchor_speed.py`. "
        f"{where(found)}. {load(found)}",
        "",
        "| weights | type | elements | bits a weight | zstd 1 | coder: encode | decode | file: encode | decode | memcpy |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        rates, zstd = row["bytes_per_s"], row["zstd_bits_per_weight"]
        names = ("coder_encode", "coder_decode", "file_encode", "file_decode", "memcpy")
        cells = " | ".join(f"{rates[name] / 1e9:.2f} GB/s" for name in names)
        lines.append(
            f"| {row['weights']} | {row['type']} | {row['elements'] / 1e6:.1f} M | {row['bits_per_weight']:.2f} "
            f"| {'-' if zstd is None else format(zstd, '.2f')} | {cells} |"
        )
    return [*lines, ""]


def _files() -> list[str]:
    found = result("speed/publish_files")
    if not found:
        return []
    lines = [
        "From file to file by the commands, `gradwire publish --watch` and `gradwire subscribe --watch`, on one disk: synthetic checkpoints of a 7.5 G model's "
        "tensors but for the number of layers, bfloat16, normal values, in files of up to 4 GB; one element in a hundred moved by one unit. Fresh: seconds from a checkpoint's appearance until the reader's "
        "file was replaced, polling every 0.2 s included. The reader writes a new file each time, so that the disk bounds it: see the copy of one file with fsync beside it. Wall time, best of the "
        "patches. Memory is the commands' largest, without the pages of mapped files, which the operating system takes back at will, and with them. The publisher's copy of the weights is in memory, or in a mapped file. "
        f"`python benchmarks/speed/publish_files.py`. {where(found)}. {load(found)}",
        "",
        "| elements | weights | base | anchor | bits a weight | encoded | fresh | patch | bits a change | encoded, s | checked and written, s | fresh, s | copy, s | memory of publish | of subscribe |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        anchor, patch = row["anchor"], row["patch"]
        lines.append(
            f"| {row['elements'] / 1e6:,.0f} M | {row['weight_bytes'] / 1e9:.1f} GB | {row['base']} | {anchor['file_bytes'] / 1e9:.2f} GB | {anchor['bits_per_weight']:.2f} | {anchor['encode_s']:.1f} s | {anchor['fresh_s']:.1f} s | {patch['file_bytes'] / 1e6:.1f} MB "
            f"| {patch['bits_per_change']:.2f} | {patch['encode_s']:.1f} | {patch['apply_s']:.1f} | {patch['fresh_s']:.1f} | {row['copy_s']:.1f} "
            f"| {row['publisher_own_bytes'] / 1e9:.1f}, {row['publisher_resident_bytes'] / 1e9:.1f} GB "
            f"| {row['subscriber_own_bytes'] / 1e9:.1f}, {row['subscriber_resident_bytes'] / 1e9:.1f} GB |"
        )
    return [*lines, ""]


_MODES = {"whole": "whole files", "patches": "patches", "relay": "patches, by a relay"}
_HOSTS = {1: "from the first step on", 2: "its link is silent for a while", 3: "begins late"}


def _freshness() -> list[str]:
    found = result("speed/published_freshness")
    if not found:
        return []
    rows = found["rows"]
    lines = [
        f"Readers of {found['elements'] / 1e6:.0f} M bfloat16 weights over links of 100 Mbit/s: {found['steps']} steps, two a second, in each of which {100 * found['share']:.2f} % of the elements "
        f"move by a unit (the share at a learning rate of 1e-6). Three readers and a store at the trainer's host; with a relay, the first reader serves the two others. One link is silent for {found['outage_s']:.0f} s, and one reader begins after step {found['late_at_step']}. "
        f"Fresh: seconds from the end of a step until a reader holds it or a later one, without the outage and what follows in 5 s. Medians of {found['turns']} turns, with the least and the most. `python benchmarks/speed/published_freshness.py`. "
        f"{where(found)}. Trainer, readers and network shared the cores. {load(found)}",
        "",
        "| published | reader | bytes a step | fresh, median of steps, s | fresh, slowest step, s | steps behind, mean | fresh again after the outage, s | late reader's first weights, s | sent by the trainer |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for mode, title in _MODES.items():
        for host, reader in _HOSTS.items():
            chosen = [row for row in rows if (row["mode"], row["host"]) == (mode, host)]
            if not chosen:
                continue
            step_bytes, sent = (
                median(row[name] for row in chosen) / 1e6 for name in ("step_bytes", "trainer_sent_bytes")
            )
            cells = [
                _spread([row[name] for row in chosen if row[name] is not None])
                for name in ("fresh_median_s", "fresh_most_s", "behind_mean_steps", "after_outage_s", "first_s")
            ]
            lines.append(f"| {title} | {reader} | {step_bytes:.2f} MB | {' | '.join(cells)} | {sent:.0f} MB |")
    return [*lines, ""]


def _spread(values: list[float]) -> str:
    """Return a median, and the least and the most of several values."""
    if not values:
        return ""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _hostile() -> list[str]:
    found = result("trials/hostile_patches")
    if not found:
        return []
    outcomes = found["outcomes"]
    wrong = sum(outcomes.get(name, 0) for name in ("touched", "wrong"))
    right = outcomes.get("right", 0)
    return [
        f"Of {found['attempts']:,} damaged and hostile files, most of them with all digests computed anew, {outcomes['refused']:,} were refused with "
        f"the reader's weights untouched, {right:,} led to weights that were published, to the last bit (such as an anchor under another step), and {wrong} to "
        f"anything else. `python benchmarks/trials/hostile_patches.py`. {where(found)}.",
        "",
    ]
