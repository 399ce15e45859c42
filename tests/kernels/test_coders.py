"""Entropy coders: what goes in comes out, all backends write the same bytes, and few of them."""

from __future__ import annotations

import doctest
import hashlib
import heapq
import importlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from coder_cases import CODER_BACKENDS, CODER_NAMES, all_backends, decoded, section_of, symbols, trits
from hypothesis import given, settings

from gradwire.errors import HyperparameterError, PayloadError
from gradwire.kernels.entropy import entropy_bits, get_coder, select
from gradwire.kernels.entropy import tables as huffman_codes
from gradwire.kernels.entropy import tables as rans_tables
from gradwire.kernels.entropy.base import VARIANTS, SectionCoder, Variants
from gradwire.kernels.entropy.cpu import compiled_body


@pytest.mark.parametrize("module", ["base", "elias", "select", "tables"])
def test_docstring_examples_hold(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"gradwire.kernels.entropy.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", CODER_NAMES)
@settings(max_examples=60)
@given(source=symbols())
def test_backends_write_the_same_bytes_and_read_them(name: str, source: torch.Tensor) -> None:
    sections = [section_of(coder, source) for coder in all_backends(name)]
    assert all(torch.equal(section, sections[0]) for section in sections)
    for coder in all_backends(name):
        assert torch.equal(decoded(coder, sections[0], source.numel()), source)


@pytest.mark.parametrize("name", CODER_NAMES)
@pytest.mark.parametrize("shift", [1, 7])
def test_buffers_may_start_anywhere(name: str, shift: int) -> None:
    source = trits(5000, 0.2)
    moved = torch.cat([torch.zeros(shift, dtype=torch.uint8), source])[shift:]
    sections = [section_of(coder, moved) for coder in all_backends(name)]
    assert all(torch.equal(section, section_of(get_coder(name, "cpu"), source)) for section in sections)
    section = torch.cat([torch.zeros(shift, dtype=torch.uint8), sections[0]])[shift:]
    assert torch.equal(decoded(get_coder(name, "cpu"), section, 5000), source)


@pytest.mark.repository
def test_very_skewed_bytes_take_what_the_page_says() -> None:
    """Header, states, tables and 12-bit probabilities are more than the entropy itself: nobody is promised less."""
    page = (Path(__file__).parents[2] / "docs" / "coders.md").read_text()
    number = 1_000_000
    for one_in, shown in ((100, "100"), (1000, "1000"), (10_000, "10 000")):
        drawn = torch.rand(number, generator=torch.Generator().manual_seed(0))
        source = (drawn < 1 / one_in).to(torch.uint8)
        bits = entropy_bits(source)
        rans, huffman = (8 * len(section_of(get_coder(name, "cpu-plain"), source)) / bits for name in CODER_NAMES)
        row = f"| 1 M | bytes, one in {shown} not zero | {bits / number:.4f} | {rans:.4f} | {huffman:.5g} |"
        assert row in page
        assert 1.05 < rans < 4.3


# Shares of trits that fire: entropies of 0.76 and 1.22 bits a trit.
@pytest.mark.parametrize("fired", [0.1506, 0.3221])
@pytest.mark.parametrize("number", [200_000, 1_000_000])
def test_rans_is_within_a_percent_of_the_entropy(fired: float, number: int) -> None:
    source = trits(number, fired)
    bits = entropy_bits(source)
    assert bits / (5 * number) == pytest.approx(0.76 if fired < 0.2 else 1.22, abs=0.01)
    assert 8 * len(section_of(get_coder("rans", "cpu"), source)) <= 1.01 * bits


@pytest.mark.parametrize("fired", [0.01, 0.05])
def test_rare_symbols_are_escaped_rather_than_paid_for_by_all(fired: float) -> None:
    # 1 % for the quantised frequencies, and 1100 bytes: header, states (512) and table (32 + at most 257 / 2 * 4).
    source = trits(200_000, fired)
    assert len(section_of(get_coder("rans", "cpu"), source)) <= 1.01 * entropy_bits(source) / 8 + 1100


def test_huffman_is_within_a_bit_of_the_entropy_each_symbol() -> None:
    # Huffman's own law (the length limit cuts codes rarer than 2^-11 only), plus header, table and whole bytes.
    for fired in (0.15, 0.32, 0.6):
        source = trits(50_000, fired)
        assert 8 * (len(section_of(get_coder("huffman", "cpu"), source)) - 200) <= entropy_bits(source) + 50_000


@pytest.mark.parametrize("backend", CODER_BACKENDS)
@pytest.mark.parametrize("name", CODER_NAMES)
def test_degenerate_symbols(name: str, backend: str) -> None:
    coder = get_coder(name, backend)
    every = torch.arange(256, dtype=torch.uint8)
    uniform = torch.cat([every[torch.randperm(256, generator=torch.Generator().manual_seed(k))] for k in range(20)])
    for source, most in [
        (every[:0], 24),
        (every[7:8], 25),
        (every[3:4].repeat(100_000), 25),
        (every, 24 + 256),
        (uniform, 24 + len(uniform)),
        # A bit a symbol, and of Huffman's fixed parts 128 + 16 + 8 bytes and at most one a stream for whole bytes.
        (torch.cat([every[:1].repeat(99_999), every[9:10]]), 24 + 156 + 100_000 // 8),
    ]:
        section = section_of(coder, source)
        assert len(section) <= most
        assert torch.equal(decoded(coder, section, source.numel()), source)


def test_sections_without_a_code_are_as_documented() -> None:
    stored = section_of(get_coder("rans", "reference"), torch.tensor([1, 2, 3], dtype=torch.uint8))
    assert stored.numpy().tobytes().hex() == "0100000003000000030000000000000006e01a664128bfb7010203"
    run = section_of(get_coder("huffman", "reference"), torch.full((258,), 9, dtype=torch.uint8))
    assert run.numpy().tobytes().hex() == "020100000201000001000000000000003b27f5584dc5b03009"


@pytest.mark.parametrize(
    ("name", "number", "size", "digest"),
    [
        ("rans", 3001, 1773, "57f05ccdf721ec28"),
        ("rans", 200_003, 77_316, "995303d305d8c53b"),
        ("huffman", 3001, 1367, "1f1a5d322854b19e"),
        ("huffman", 200_003, 80_386, "9f0ac6db94b6e845"),
    ],
)
def test_sections_are_the_bytes_that_they_always_were(name: str, number: int, size: int, digest: str) -> None:
    index = torch.arange(number, dtype=torch.int64)
    mixed = (index * 2654435761 % 2**32) >> 8
    source = (mixed % 251 * (mixed % 7) * (mixed % 3 == 0) % 256).to(torch.uint8)
    for coder in all_backends(name)[0 if number < 10_000 else 1 :]:  # the reference is slow
        section = section_of(coder, source)
        assert (len(section), hashlib.sha256(section.numpy().tobytes()).hexdigest()[:16]) == (size, digest)


@pytest.mark.parametrize("backend", ["cpu", "cpu-plain"])
def test_symbols_that_the_sample_misses_are_escaped(backend: str) -> None:
    number = 1 << 19
    assert rans_tables.sample_step(number) == 8
    source = torch.zeros(number, dtype=torch.uint8)
    source[::2] = 1
    rows = source.view(-1, 128)
    rows[1::4, 5] = torch.arange(number // 512).to(torch.uint8)
    rows[::8, 7] = 3  # every row that is counted, and only those: what is counted decides the frequencies
    rows[-1] = 255
    coder = get_coder("rans", backend)
    section = section_of(coder, source)
    assert len(section) < number // 4
    assert torch.equal(section, section_of(get_coder("rans", "reference"), source))
    assert torch.equal(decoded(coder, section, number), source)
    constant = torch.zeros(number, dtype=torch.uint8)
    constant.view(-1, 128)[2, 3] = 9  # what was counted is all one symbol
    assert torch.equal(decoded(coder, section_of(coder, constant), number), constant)


def test_frequencies_sum_to_the_scale_and_survive_writing() -> None:
    generator = np.random.default_rng(0)
    cases = [np.ones(256), np.eye(256)[3], np.r_[1, np.zeros(254), 1], np.arange(256), 1.2 ** np.arange(256)]
    cases += [generator.random(256) ** power * 1e6 * (generator.random(256) < 0.5) for power in (1, 3, 9, 30, 90)]
    for counts in cases:
        counts = np.minimum(counts, 2**40).astype(np.int64)
        frequencies, back, room = np.zeros(257, np.int64), np.zeros(257, np.int64), np.zeros(600, np.uint8)
        rans_tables.choose_frequencies(counts, frequencies)
        assert frequencies.sum() == 4096
        assert frequencies.max() < 4096
        assert (counts[frequencies[:256] > 0] > 0).all()
        end = rans_tables.write_frequencies(frequencies, room, 8)
        assert rans_tables.read_frequencies(room, 8, end, back)
        assert np.array_equal(frequencies, back)
        assert not rans_tables.read_frequencies(room, 8, end + 1, back)
        assert not rans_tables.read_frequencies(room, 8, end - 1, back)


def huffman_cost(counts: list[int]) -> int:
    """Bits that the best code of unlimited lengths takes: the sum of the weights of all inner nodes."""
    heap, cost = list(counts), 0
    heapq.heapify(heap)
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        cost += both
        heapq.heappush(heap, both)
    return cost


def chosen_lengths(counts: np.ndarray) -> np.ndarray:
    size = np.zeros(256, np.int64)
    scratch = np.zeros(256, np.int64), np.zeros((2, 512), np.int64), np.zeros((huffman_codes.MAX_LENGTH, 512), np.uint8)
    huffman_codes.choose_lengths(counts, size, *scratch)
    return size


def test_code_lengths_are_the_best_and_limited() -> None:
    generator = np.random.default_rng(1)
    for used in (2, 3, 10, 100, 256):
        counts = np.zeros(256, np.int64)
        counts[generator.permutation(256)[:used]] = generator.integers(20, 50, used)  # none rarer than 2^-10
        size = chosen_lengths(counts)
        assert (size[counts == 0] == 0).all()
        assert (counts * size).sum() == huffman_cost(counts[counts > 0].tolist())
    fibonacci = np.zeros(256, np.int64)
    fibonacci[:2] = 1
    for index in range(2, 30):
        fibonacci[index] = fibonacci[index - 1] + fibonacci[index - 2]
    size = chosen_lengths(fibonacci)
    assert size.max() == huffman_codes.MAX_LENGTH  # unlimited it would be 29
    assert sum(2.0 ** -float(length) for length in size[:30]) == 1


def test_limited_lengths_are_the_best_of_all() -> None:
    counts = np.zeros(256, np.int64)
    counts[:5] = (1, 2, 4, 8, 100)
    best = min(
        sum(c * l for c, l in zip(counts[:5].tolist(), choice))
        for choice in itertools.product(range(1, 12), repeat=5)
        if sum(2**-l for l in choice) <= 1
    )
    assert (chosen_lengths(counts) * counts).sum() == best


@pytest.mark.parametrize("name", CODER_NAMES)
def test_two_threads_do_not_disturb_each_other(name: str) -> None:
    coder = get_coder(name, "cpu")
    sources = [trits(50_000 + 100 * seed, 0.1 + 0.02 * seed, seed) for seed in range(8)]

    def there_and_back(source: torch.Tensor) -> bool:
        return torch.equal(decoded(coder, section_of(coder, source), source.numel()), source)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(there_and_back, sources))


@pytest.mark.parametrize("name", CODER_NAMES)
def test_wrong_tensors_are_refused_before_memory_is_touched(name: str) -> None:
    coder = get_coder(name, "cpu")
    source, out = trits(1000, 0.2), torch.zeros(2000, dtype=torch.uint8)
    for wrong in (source.float(), source.view(2, 500), out[::2]):
        with pytest.raises(HyperparameterError, match="a contiguous vector"):
            coder.encode(wrong, out)
        with pytest.raises(HyperparameterError, match="a contiguous vector"):
            coder.decode(out, wrong)
    with pytest.raises(HyperparameterError, match="out has 1023 bytes, at least 1024"):
        coder.encode(source, out[:1023])


def test_choice_of_coder_and_backend() -> None:
    assert get_coder("rans") is get_coder("rans")
    huffman = get_coder("huffman")
    # Which of the two serves by default is measured where it runs.
    assert huffman.name == "huffman"
    assert huffman.backend in ("cpu", "cpu-plain")
    assert [get_coder("huffman", name).backend for name in ("cpu-plain", "reference")] == ["cpu-plain", "reference"]
    with pytest.raises(HyperparameterError, match="did you mean 'rans'"):
        get_coder("ans")
    with pytest.raises(HyperparameterError, match="did you mean 'cpu-plain'"):
        get_coder("rans", "cpu_plain")


@pytest.mark.parametrize("name", CODER_NAMES)
@pytest.mark.parametrize("turn", range(4))
def test_of_each_part_the_variant_with_the_least_time_serves(
    name: str, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(calls: Mapping[str, Callable[[], object]], turns: int = 0) -> dict[str, float]:
        return {variant: float((place - turn) % len(calls)) for place, variant in enumerate(calls)}

    monkeypatch.setattr(select, "fastest", told)
    monkeypatch.setattr(select, "_measured", select.measure)
    found = select.select.__wrapped__(name)
    parts = VARIANTS[name]
    assert asdict(found.variants) == {part: names[turn % len(names)] for part, names in parts.items()}
    assert {part: tuple(times) for part, times in found.ns_per_byte.items()} == parts
    coder = SectionCoder(compiled_body(name, found.variants))
    assert coder.variants == found.variants
    assert torch.equal(decoded(coder, section_of(coder, trits(5000, 0.2)), 5000), trits(5000, 0.2))


def test_a_backend_of_explicit_vectors_leaves_plain_loops_out_where_it_can() -> None:
    for name in CODER_NAMES:
        for part, times in select.select(name, scalar=False).ns_per_byte.items():
            assert ("scalar" in times) == (VARIANTS[name][part] == ("scalar",))


def test_a_variant_that_differs_or_does_not_compile_is_left_out_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def agrees(coder: SectionCoder) -> bool:
        variants = coder.variants
        if variants is not None and variants.encode == "simd":
            raise RuntimeError("no such instruction")
        return variants is None or not variants.decode.startswith("simd")

    monkeypatch.setattr(select, "agrees", agrees)
    monkeypatch.setattr(select, "default_file", lambda: tmp_path / "times.json")
    monkeypatch.setattr(select, "_measured", select._measured.__wrapped__)
    with pytest.warns(UserWarning, match="does not serve here") as caught:
        found = select.select.__wrapped__("rans")
    differs = "does not serve here (its results differ from the reference); others do, which may be slower"
    fails = "does not serve here (its code does not compile: RuntimeError: no such instruction); others do, which may"
    assert [str(warning.message) for warning in caught] == [
        f"variant 'simd' of rans's encode {fails} be slower",
        *(f"variant {variant!r} of rans's decode {differs}" for variant in VARIANTS["rans"]["decode"][:-1]),
    ]
    assert set(found.ns_per_byte["decode"]) == set(found.ns_per_byte["encode"]) == {"scalar"}
    assert (found.variants.encode, found.variants.decode) == ("scalar", "scalar")
    with pytest.warns(UserWarning, match="does not serve here"):
        select.select.__wrapped__("rans")  # in the next process, too


def test_times_are_kept_and_what_they_choose_is_compared_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def told(calls: Mapping[str, Callable[[], object]], turns: int = 0) -> dict[str, float]:
        measured.append(list(calls))
        return {variant: float(variant != "simd-widened") + place for place, variant in enumerate(reversed(calls))}

    monkeypatch.setattr(select, "fastest", told)
    monkeypatch.setattr(select, "default_file", lambda: tmp_path / "times.json")
    monkeypatch.setattr(select, "_measured", select._measured.__wrapped__)
    first = select.select.__wrapped__("rans")
    assert len(measured) == 3
    assert select.select.__wrapped__("rans") == first
    assert select.select.__wrapped__("rans", False).variants.encode == "simd"
    assert len(measured) == 3
    select.select.__wrapped__("huffman")
    select.select.__wrapped__("rans")
    assert len(measured) == 6
    for damage in (
        lambda text: text[:100],
        lambda text: text.replace('"simd-picked"', '"simd-guessed"'),
        lambda text: text.replace("rans decode", "rans encode"),
        lambda text: text.replace('"machine": "', '"machine": "not '),
    ):
        file = tmp_path / "times.json"
        file.write_text(damage(file.read_text()))
        before = len(measured)
        assert select.select.__wrapped__("rans") == first
        assert len(measured) == before + 3
    right, refused = select.agrees, []

    def agrees(coder: SectionCoder) -> bool:
        if coder.variants == first.variants and not refused:
            refused.append(coder)
            return False
        return right(coder)

    monkeypatch.setattr(select, "agrees", agrees)
    before = len(measured)
    assert select.select.__wrapped__("rans") == first
    assert (len(measured), len(refused)) == (before + 3, 1)


def test_a_wrong_variant_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    coder = get_coder("rans", "cpu-plain")
    assert select.agrees(coder)
    body = compiled_body("rans", Variants("scalar", "scalar", "scalar"))
    for part in ("encode", "decode"):
        right = getattr(body, part)

        def wrong(source: np.ndarray, target: np.ndarray, right: Callable[..., int] = right) -> int:
            status = right(source, target)
            target[:1] ^= 1
            return status

        with monkeypatch.context() as patch:
            patch.setattr(body, part, wrong, raising=False)
            try:
                assert not select.agrees(SectionCoder(body))
            except PayloadError:
                assert part == "encode"


def test_warm_up_compiles_every_signature_that_calls_use() -> None:
    from gradwire.kernels.checksum import loops as checksum_loops
    from gradwire.kernels.entropy import huffman_loops, rans_loops

    compiled = [checksum_loops.check, rans_loops.rans_encode, rans_loops.rans_decode]
    compiled += [huffman_loops.huffman_encode, huffman_loops.huffman_decode]
    coders = [coder for name in CODER_NAMES for coder in all_backends(name)[1:] if isinstance(coder, SectionCoder)]
    for coder in coders:
        coder.warm_up()
    before = [len(driver.signatures) for driver in compiled]
    for coder, fired in itertools.product(coders, (0.001, 0.3, 1.0)):
        source = trits(3001, fired)[1:]
        decoded(coder, section_of(coder, source)[:], 3000)
    assert [len(driver.signatures) for driver in compiled] == before
    assert all(before)


def test_importing_the_coders_neither_imports_numba_nor_compiles() -> None:
    code = "import sys, gradwire.kernels.entropy; print('numba' in sys.modules or 'llvmlite' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
