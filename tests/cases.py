"""The table of methods: one row each. Every shared property runs over every row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

import gradwire as gw
from gradwire.kernels import digit_layout
from laws import (
    atoms,
    behind_rotation,
    bounded,
    exactly,
    fitted,
    frequencies,
    lattice,
    levels,
    multi_scale,
    natural,
    natural_of_mean,
    rotated,
    ternary,
)

Law = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A method with what the shared tests hold it to.

    Attributes:
        method: The method.
        bits: Bits that a rank sends for an element among N ranks (two-shot or gather, whichever is less; no headers).
        target: What the mean over draws is for gradients ``[N, n]``: the gradients, or the clipped ones.
        variance: Of each element of each worker's contribution, float64 ``[N, n]``; None: ``error`` bounds the error.
        error: Largest relative error of the mean, where there is no law of a variance.
        constants: Whether vectors of one value come back exactly.
        symmetric: Whether -g gives exactly the negative.
        direction: Whether the outcome is a direction, not a mean.
        coded: Whether bytes depend on what is sent; ``bits`` are then of Gaussian gradients.
        memory: Whether a round's law depends on the rounds before; ``variance`` is then that of the first.
        cycle: Rounds in which every element is sent once.
        mean_variance: Of each element of the mean where its owner encodes it once more, among three workers or more.
        amplifies: Whether what is added up, or decoded, may be several times as large as any element.
        vectors: Whether a parameter with one dimension is compressed, as those of the shared tests are.
        grain: Elements that a rank's share is rounded up to, where that is more than a few.
    """

    method: gw.Method
    bits: Callable[[int], float]
    target: Law = exactly
    variance: Law | None = None
    error: float = 0.0
    constants: bool = True
    symmetric: bool = True
    direction: bool = False
    memory: bool = False
    coded: bool = False
    cycle: int = 1
    mean_variance: Law | None = None
    grain: int = 0
    vectors: bool = True
    amplifies: bool = False

    def noise(self, g: torch.Tensor) -> torch.Tensor:
        """Return the variance of each element of the mean."""
        if self.variance is None:
            return torch.zeros(g.shape[1]).double()
        # Workers are independent: their variances add up.
        of_workers = self.variance(g).sum(0) / len(g) ** 2
        return of_workers if self.mean_variance is None or len(g) < 3 else of_workers + self.mean_variance(g)

    @property
    def unbiased(self) -> bool:
        """Whether the mean over draws is ``target``: what is declared, or holds for the clipped gradient alone."""
        return self.method.traits.unbiased or self.target is not exactly

    def __repr__(self) -> str:
        return repr(self.method)


def ring(bits: float) -> Callable[[int], float]:
    return lambda n: 2 * bits * (n - 1) / n


def gather(bits: float) -> Callable[[int], float]:
    return lambda n: bits * (n - 1)


def narrow(bits: float) -> Callable[[int], float]:
    """To all, or to an owner and the mean back from it, whichever is less."""
    return lambda n: min(n - 1, 2 * (n - 1) / n) * bits


def doubling(bits: float) -> Callable[[int], float]:
    """To one rank after the other, as many as there are doublings, and two more for a rank with a twin beyond them."""
    return lambda n: bits * ((n.bit_length() - 1) + (n & (n - 1) != 0))


def vote(n: int) -> float:
    """A bit up and a bit down."""
    return 2 * (n - 1) / n


def ternary_bits(n: int) -> float:
    sums = {2: 32 / 13, 3: 32 / 11, 4: 16 / 5, 8: 32 / 7, 64: 8}[n]
    return min(1.6 * (n - 1), (1.6 + sums) * (n - 1) / n)


def shared_bits(s: int, mask: int = 0) -> Callable[[int], float]:
    """Digits of base 2s + 1 up and of base 2sN + 1 down, or up to all; and so for the bits of a mask."""

    def bits(n: int) -> float:
        up, down = (digit_layout(2 * s * k + 1).bits_per_value for k in (1, n))
        return min((up + mask) * (n - 1), (up + down + 2 * mask) * (n - 1) / n)

    return bits


def max_bits(block_size: int) -> Callable[[int], float]:
    """A float32 a block through a maximum over the workers: above 64 KiB by a ring, as for 64 workers it is not."""
    return lambda n: (gather if n == 64 else ring)(32 / block_size)(n)


def rotation(method: gw.EDEN | gw.DRIVE, bits: float, relative: float) -> Case:
    size = method.block_size
    variance, mean_variance = rotated(relative, size)
    return Case(
        method,
        narrow(bits + 32 / size),
        variance=variance,
        mean_variance=mean_variance,
        constants=False,
        grain=size,
        amplifies=True,
    )


shared_levels = levels(range(16), None, "max", shared=True)

TABLE: dict[str, list[Case]] = {
    "fp32": [Case(gw.FP32(), ring(32), error=2e-7)],
    "fp16": [Case(gw.FP16(), ring(16), error=2e-3)],
    "bf16": [Case(gw.BF16(), ring(16), error=2e-2)],
    "terngrad": [
        Case(gw.TernGrad(), ternary_bits, *ternary(2.5)),
        Case(gw.TernGrad(clip=None), ternary_bits, *ternary(None)),
        Case(gw.TernGrad(clip=1.0), ternary_bits, *ternary(1.0)),
        Case(gw.TernGrad(clip_by="std"), ternary_bits, *ternary(2.5, clip_by="std")),
        Case(gw.TernGrad(share_scaler=False), gather(1.6), *ternary(2.5, shared=False)),
        # The first round exchanges scalers; tests/methods/test_terngrad_ahead.py has the others.
        Case(gw.TernGrad(ahead=True), ternary_bits, *ternary(2.5), memory=True),
    ],
    "qsgd": [
        Case(gw.QSGD(), gather(16 / 3 + 32 / 512), variance=levels(range(17), 512, "l2"), constants=False),
        Case(
            gw.QSGD(levels=3, block_size=64, blocks="model"),
            gather(32 / 11 + 32 / 64),
            variance=levels(range(4), 64, "l2"),
            constants=False,
        ),
    ],
    "qsgdinf": [
        Case(gw.QSGDinf(), gather(4 + 32 / 512), variance=levels(range(8), 512, "max")),
        Case(gw.QSGDinf(levels=1, block_size=None), gather(1.6), variance=levels(range(2), None, "max")),
    ],
    "nuqsgd": [
        Case(
            gw.NUQSGD(),
            gather(4 + 32 / 512),
            variance=levels([0, *(2.0**j for j in range(7))], 512, "l2"),
            constants=False,
        ),
        Case(
            gw.NUQSGD(levels=4, zero=False, norm="max", block_size=80),
            gather(3.2 + 32 / 80),
            variance=levels([-1, 1, 2, 4, 8], 80, "max"),
            constants=False,
        ),
    ],
    "dorefa": [
        Case(gw.DoReFa(), gather(6.4 + 32 / 512), variance=levels([-1, *range(1, 64, 2)], 512, "max")),
        Case(gw.DoReFa(bits=2, block_size=None), gather(2), variance=levels([-1, 1, 3], None, "max")),
        Case(
            gw.DoReFa(bits=1, block_size=64, blocks="model"), gather(1 + 32 / 64), variance=levels([-1, 1], 64, "max")
        ),
    ],
    "qsgdmaxnorm": [
        Case(gw.QSGDMaxNorm(), shared_bits(15), variance=levels(range(16), None, "max", shared=True)),
        Case(
            gw.QSGDMaxNorm(levels=7, block_size=48),
            lambda n: shared_bits(7)(n) + max_bits(48)(n),
            variance=levels(range(8), 48, "max", shared=True),
        ),
        Case(
            gw.QSGDMaxNorm(levels=1, blocks="model"),
            shared_bits(1),
            variance=levels(range(2), None, "max", shared=True),
        ),
    ],
    "multiscale": [
        Case(gw.MultiScale(), shared_bits(15, mask=1), variance=multi_scale((15, 255), None)),
        Case(
            gw.MultiScale(levels=(7, 21, 90), block_size=48),
            lambda n: shared_bits(7, mask=2)(n) + max_bits(48)(n),
            variance=multi_scale((7, 21, 90), 48),
        ),
    ],
    "eden": [
        rotation(gw.EDEN(), 4, 0.00959),
        rotation(gw.EDEN(bits=1, block_size=256), 1, 0.571),
        rotation(gw.EDEN(bits=1.6, block_size=512), 1.6, 0.235),
        rotation(gw.EDEN(bits=0.5), 0.5, math.pi - 1),
    ],
    "drive": [
        rotation(gw.DRIVE(), 1, 0.571),
        Case(gw.DRIVE(least_error=True, block_size=512), narrow(1 + 32 / 512), error=0.7, constants=False, grain=512),
    ],
    "quic_fl": [
        Case(
            gw.QUICFL(),
            gather(4 + 48 / 256 + 32 / 4096),
            variance=bounded(4, 4096),
            constants=False,
            symmetric=False,
            grain=4096,
            amplifies=True,
        ),
        Case(
            gw.QUICFL(bits=1, block_size=512),
            gather(1 + 48 / 256 + 32 / 512),
            variance=bounded(1, 512),
            constants=False,
            symmetric=False,
            amplifies=True,
        ),
    ],
    "rotated": [
        Case(
            gw.Rotated(),
            shared_bits(15),
            variance=behind_rotation(shared_levels, 4096),
            constants=False,
            grain=4096,
            amplifies=True,
        ),
        Case(
            gw.Rotated(compressor=gw.QSGDinf(levels=3, block_size=64), block_size=256),
            gather(32 / 11 + 32 / 64),
            variance=behind_rotation(levels(range(4), 64, "max"), 256),
            constants=False,
            amplifies=True,
        ),
        Case(
            gw.Rotated(compressor=gw.ScaledSign(), block_size=512),
            gather(1),
            error=0.7,
            constants=False,
            amplifies=True,
        ),
    ],
    "powersgd": [
        Case(gw.PowerSGD(), ring(32), error=2e-7, memory=True, vectors=False),
        Case(gw.PowerSGD(values=gw.BF16()), ring(32), error=2e-7, memory=True, vectors=False),
        Case(gw.PowerSGD(values=gw.QSGDinf(block_size=256)), gather(32), error=2e-7, memory=True, vectors=False),
    ],
    "acp_sgd": [
        Case(gw.ACPSGD(), ring(32), error=2e-7, memory=True, vectors=False),
        Case(gw.ACPSGD(values=gw.QSGDMaxNorm()), ring(32), error=2e-7, memory=True, vectors=False),
    ],
    "natural": [Case(gw.Natural(), narrow(9), variance=natural, mean_variance=natural_of_mean)],
    "naturaldithering": [
        Case(
            gw.NaturalDithering(),
            gather(32 / 7),
            variance=levels([0, *(2.0**j for j in range(8))], None, "l2"),
            constants=False,
        ),
        Case(
            gw.NaturalDithering(levels=3, norm="max", block_size=64),
            gather(32 / 11 + 32 / 64),
            variance=levels([0, 1, 2, 4], 64, "max"),
        ),
    ],
    "lattice": [
        Case(gw.Lattice(), gather(4), variance=lattice(16, None), constants=False, symmetric=False),
        Case(
            gw.Lattice(colours=256, distance=60.0),
            gather(8),
            variance=lattice(256, 60.0),
            constants=False,
            symmetric=False,
        ),
    ],
    "errorfeedback": [
        Case(gw.ErrorFeedback(), gather(4 + 32 / 256), memory=True, variance=levels(range(8), 256, "max")),
        Case(
            gw.ErrorFeedback(compressor=gw.GRandK(cycle=4)),
            lambda n: shared_bits(15)(n) / 4,
            memory=True,
            error=1.001,
            constants=False,
            cycle=4,
        ),
    ],
    "ef21": [
        Case(gw.EF21(), gather(1 + 32 / 64), error=0.75, memory=True),
        Case(
            gw.EF21(compressor=gw.QSGDinf(block_size=256)),
            gather(4 + 32 / 256),
            memory=True,
            variance=levels(range(8), 256, "max"),
        ),
    ],
    "dqgd": [Case(gw.DQGD(), gather(1.6 + 32 / 64), variance=levels([0, 1], 64, "max"))],
    "diana": [Case(gw.DIANA(), gather(1.6 + 32 / 64), memory=True, variance=levels([0, 1], 64, "max"))],
    # Of a vector with the tests' tails, a hundredth holds a sixth of the square, a tenth more than half.
    "topk": [
        Case(gw.TopK(), gather(0.01 * (32 + 8.14)), error=1.0, constants=False, coded=True),
        Case(
            gw.TopK(density=1 / 16, block_size=256, values=gw.BF16()),
            gather((16 + 5.4) / 16),
            error=0.9,
            constants=False,
            coded=True,
        ),
        Case(
            gw.TopK(density=0.1, blocks="model", values=gw.QSGDinf(levels=1, block_size=64)),
            gather(0.1 * (1.6 + 32 / 64 + 4.75)),
            error=1.5,
            constants=False,
            coded=True,
        ),
    ],
    "randk": [
        Case(gw.RandK(), ring(0.32), error=1.001, constants=False),
        Case(
            gw.RandK(density=0.25, coordinates="private", rescale=True),
            gather(8),
            variance=lambda g: (g.shape[1] / (g.shape[1] // 4) - 1) * g.double().square(),
            constants=False,
            amplifies=True,
        ),
        Case(gw.RandK(density=0.1, coordinates="private", contiguous=True), gather(3.2), error=1.001, constants=False),
        Case(
            gw.RandK(density=0.1, contiguous=True, values=gw.QSGDinf(levels=7, block_size=64)),
            gather(0.1 * (4 + 32 / 64)),
            error=1.001,
            constants=False,
        ),
    ],
    "threshold": [
        Case(gw.Threshold(), lambda n: gather(32.0)(n), error=0.01, constants=True, coded=True),
        Case(gw.Threshold(threshold=2.0), gather(0.0455 * (32 + 5.9)), error=0.95, constants=False, coded=True),
    ],
    "atomo": [
        Case(
            gw.ATOMO(density=0.2),
            gather(0.2 * (32 + 3.75)),
            variance=atoms(0.2),
            constants=False,
            coded=True,
            amplifies=True,
        ),
        Case(gw.ATOMO(norm="max"), gather(0.4), variance=levels([0, 1], None, "max"), coded=True),
    ],
    "cat": [
        Case(gw.CAT(), lambda n: gather(64.0)(n), error=1.0, constants=False, coded=True),
        Case(
            gw.CAT(scheme="sign", packet_bytes=256, blocks="parameter"),
            lambda n: gather(64.0)(n),
            error=1.5,
            constants=False,
            coded=True,
        ),
        Case(
            gw.CAT(scheme="stochastic", blocks="parameter"),
            lambda n: gather(64.0)(n),
            error=1.0,
            constants=False,
            coded=True,
            amplifies=True,
        ),
    ],
    "fourier_atomo": [
        Case(
            gw.FourierATOMO(density=0.2, block_size=256),
            gather(0.1 * (64 + 3.75)),
            variance=frequencies(0.2, 256),
            constants=False,
            coded=True,
            amplifies=True,
        ),
        Case(
            gw.FourierATOMO(density=0.05),
            gather(0.025 * (64 + 5.8)),
            variance=frequencies(0.05, 4096),
            constants=False,
            coded=True,
            amplifies=True,
        ),
    ],
    "spectral_atomo": [Case(gw.SpectralATOMO(), gather(32), error=2e-7, constants=False, coded=True, vectors=False)],
    "gtopk": [
        Case(
            gw.GTopK(),
            lambda n: doubling(0.1 * (32 + 4.8))(n),
            error=1.01,
            constants=False,
            coded=True,
            memory=True,
            amplifies=True,
        ),
        Case(
            gw.GTopK(density=0.05, blocks="parameter", values=gw.BF16()),
            lambda n: doubling(0.05 * (16 + 5.8))(n),
            error=1.0,
            constants=False,
            coded=True,
            memory=True,
            amplifies=True,
        ),
        Case(
            gw.GTopK(density=0.05, values=gw.QSGDinf(levels=3, block_size=64)),
            lambda n: doubling(0.05 * (math.log2(7) + 0.5 + 5.8))(n),
            error=1.01,
            constants=False,
            coded=True,
            memory=True,
            amplifies=True,
        ),
    ],
    "clt_k": [
        Case(
            gw.CLTk(),
            lambda n: ring(3.2)(n) + 0.48 * (n - 1).bit_length(),
            error=1.01,
            constants=False,
            coded=True,
            memory=True,
            amplifies=True,
        ),
        Case(
            gw.CLTk(density=0.1, beta=0.5, momentum=0.5),
            lambda n: ring(3.2)(n) + 0.475 * (n - 1).bit_length(),
            error=1.0,
            constants=False,
            coded=True,
            memory=True,
            amplifies=True,
        ),
    ],
    # From the second round on both send codes.
    "lgc": [
        Case(
            gw.LGC(density=0.05, full_rounds=0, training_rounds=1),
            lambda n: ring(1.6)(n) + 0.75 * (n - 1).bit_length(),
            error=1.0,
            constants=False,
            coded=True,
            memory=True,
            amplifies=True,
        ),
        Case(
            gw.LGC(
                instance="parameter_server",
                density=0.05,
                innovation=0.01,
                order="index",
                feedback="reconstruction",
                optimizer="sgd",
                full_rounds=0,
                training_rounds=1,
            ),
            gather(0.05 * (32 + 5.75)),
            error=1.0,
            constants=False,
            coded=True,
            memory=True,
            amplifies=True,
        ),
    ],
    # From the second round on values are read from a curve.
    "rank_curve": [
        Case(
            gw.RankCurve(density=0.05, full_rounds=0, training_rounds=1),
            lambda n: 0.75 * (n - 1).bit_length(),
            error=1.0,
            constants=False,
            coded=True,
            memory=True,
            amplifies=True,
        ),
    ],
    "sketched_sgd": [
        Case(
            gw.SketchedSGD(),
            lambda n: ring(32 * 0.54)(n),
            error=1.001,
            constants=False,
            memory=True,
            amplifies=True,
        ),
        Case(
            gw.SketchedSGD(rows=3, columns=97, density=0.02, candidates=2, momentum=0.5),
            lambda n: ring(32 * (0.04 + 3 * 97e-6))(n),
            error=1.001,
            constants=False,
            memory=True,
            amplifies=True,
        ),
    ],
    "sketched_amsgrad": [
        Case(gw.SketchedAMSGrad(), ring(32 * 0.58), constants=False, direction=True, memory=True, amplifies=True),
        Case(
            gw.SketchedAMSGrad(beta1=0.5, eps=0.01, rows=3, columns=97, density=0.02, candidates=2),
            ring(32 * (2 * 0.04 + 3 * 97e-6)),
            constants=False,
            direction=True,
            memory=True,
            amplifies=True,
        ),
    ],
    "sidco": [
        Case(gw.SIDCo(), gather(0.05 * (32 + 5.8)), error=1.01, constants=False, coded=True),
        Case(
            gw.SIDCo(density=0.05, model="gamma", stages=2, blocks="model", values=gw.BF16()),
            gather(0.05 * (16 + 5.8)),
            error=0.95,
            constants=False,
            coded=True,
        ),
    ],
    "dgc": [
        Case(gw.DGC(), gather(0.05 * (32 + 5.8)), error=1.01, constants=False, coded=True, memory=True),
        Case(
            gw.DGC(density=0.05, momentum=0.5, nesterov=True, clip_norm=1e6, warmup_rounds=3),
            gather(0.25 * (32 + 3.3)),
            error=1.0,
            constants=False,
            coded=True,
            memory=True,
            amplifies=True,
        ),
    ],
    "scheduled": [
        Case(gw.Scheduled(), gather(0.25 * (32 + 3.3)), error=1.0, constants=False, coded=True),
        # The shared tests stay in the first of these stages,
        Case(
            gw.Scheduled(compressor=gw.QSGDinf(), field="levels", start=1, schedule="linear", rounds=100_000),
            gather(1.6 + 32 / 512),
            variance=levels(range(2), 512, "max"),
        ),
        # and go through all of those.
        Case(
            gw.Scheduled(
                compressor=gw.ErrorFeedback(compressor=gw.TopK(density=0.01)),
                start=(0.5, 0.1),
                schedule="step",
                rounds=3,
            ),
            gather(0.1 * (32 + 4.75)),
            error=1.0,
            constants=False,
            coded=True,
            memory=True,
        ),
    ],
    # Of one rank a node all ranks are between nodes; tests/methods/test_hierarchical.py has nodes of several.
    "hierarchical": [
        Case(gw.Hierarchical(compressor=gw.TernGrad(), node_size=1), ternary_bits, *ternary(2.5)),
        Case(
            gw.Hierarchical(compressor=gw.QSGDinf(block_size=64), node_size=1),
            gather(4 + 32 / 64),
            variance=levels(range(8), 64, "max"),
        ),
    ],
    "local_sgd": [
        Case(gw.LocalSGD(), ring(32), error=2e-7),
        Case(gw.LocalSGD(inner=gw.QSGDinf(block_size=64)), gather(4 + 32 / 64), variance=levels(range(8), 64, "max")),
    ],
    "diloco": [Case(gw.DiLoCo(), ring(32), error=2e-7)],
    "sparse_loco": [
        Case(
            gw.SparseLoCo(),
            gather(1 / 64 * (2 + 7.4)),
            error=1.0,
            constants=False,
            coded=True,
            memory=True,
            amplifies=True,
        )
    ],
    "streaming_diloco": [Case(gw.StreamingDiLoCo(), ring(32), error=2e-7)],
    "easgd": [Case(gw.EASGD(), ring(32), error=2e-7)],
    "async_server": [
        Case(gw.AsyncServer(), gather(4 + 32 / 256), memory=True, variance=levels(range(8), 256, "max")),
        Case(
            gw.AsyncServer(gw.QSGDinf(block_size=64), staleness=0),
            gather(4 + 32 / 64),
            variance=levels(range(8), 64, "max"),
        ),
    ],
    "l_greco": [
        Case(gw.LGreCo(), gather(4 + 32 / 512), variance=levels(range(8), 512, "max")),
        Case(
            gw.LGreCo(compressor=gw.TopK(density=0.1), field="density", values=(0.01, 0.03, 0.3), every=1),
            gather(0.1 * (32 + 4.75)),
            error=0.9,
            constants=False,
            coded=True,
            memory=True,
        ),
        # With one layer the uniform value is the one with the fewest bytes.
        Case(
            gw.LGreCo(compressor=gw.QSGD(levels=5, block_size=64), values=(2, 17), every=1),
            gather(32 / 9 + 32 / 64),
            variance=levels(range(6), 64, "l2"),
            constants=False,
        ),
    ],
    "coded": [
        Case(gw.Coded(), lambda n: 1.74 * 0.75 * n, *ternary(2.5), coded=True),
        Case(
            gw.Coded(compressor=gw.QSGD(), coder="huffman"),
            gather(1.9),
            variance=levels(range(17), 512, "l2"),
            constants=False,
            coded=True,
        ),
        replace(
            rotation(gw.EDEN(bits=1.5, block_size=1024, spacing="uniform"), 1.5, 0.2163),
            method=gw.Coded(compressor=gw.EDEN(bits=1.5, block_size=1024, spacing="uniform"), coder="rans"),
            coded=True,
        ),
        Case(
            gw.Coded(compressor=gw.TopK(density=0.1), coder="huffman"),
            gather(0.1 * (32 + 4.75)),
            error=0.9,
            constants=False,
            coded=True,
        ),
        # Sign, seven bits, and the exponents of a Gaussian with their entropy, from two workers on.
        Case(gw.Coded(compressor=gw.BF16()), ring(10.6), error=2e-2, coded=True),
    ],
    # The error of a Gaussian with the tests' tails is sqrt(1 - 2/pi e^(-1/4)) = 0.71 of its norm.
    "scaledsign": [
        Case(gw.ScaledSign(), gather(1), error=0.75),
        Case(gw.ScaledSign(block_size=112), gather(1 + 32 / 112), error=0.75),
    ],
    "ef_signsgd": [
        Case(gw.EFSignSGD(), gather(1), error=0.75),
        Case(gw.EFSignSGD(block_size=64, momentum=0.5), gather(1 + 32 / 64), error=0.75, memory=True),
    ],
    # A tie is a vote for +1, whichever way it came about.
    "signsgd": [Case(gw.SignSGD(), vote, symmetric=False, direction=True)],
    "signum": [
        Case(gw.Signum(), vote, symmetric=False, direction=True),
        Case(gw.Signum(momentum=0.0), vote, symmetric=False, direction=True),
    ],
    "onebit": [
        Case(gw.OneBit(), gather(1), error=0.75),
        Case(gw.OneBit(block_size=48), gather(1 + 64 / 48), error=0.75),
    ],
    "p_quantisation": [
        Case(gw.PQuantisation(), gather(1.6 + 32 / 64), variance=levels([0, 1], 64, "l2"), constants=False),
        Case(
            gw.PQuantisation(p=1, block_size=16),
            gather(1.6 + 32 / 16),
            variance=levels([0, 1], 16, "l1"),
            constants=False,
        ),
        Case(gw.PQuantisation(p="inf", blocks="model"), gather(1.6 + 32 / 64), variance=levels([0, 1], 64, "max")),
    ],
    # Of a round, all but what is sent is missing; multiplied by C, the error's square is (C - 1) times the signal's.
    "grandk": [
        Case(gw.GRandK(), lambda n: shared_bits(15)(n) / 64, error=1.001, constants=False, cycle=64),
        Case(
            gw.GRandK(compressor=gw.MultiScale(), cycle=5),
            lambda n: shared_bits(15, mask=1)(n) / 5,
            error=1.001,
            constants=False,
            cycle=5,
        ),
        Case(
            gw.GRandK(compressor=gw.QSGDMaxNorm(blocks="model"), cycle=3, rescale=True),
            lambda n: shared_bits(15)(n) / 3,
            error=1.6,
            constants=False,
            cycle=3,
        ),
    ],
}

for adaptive in (gw.ALQ, gw.ALQN, gw.AMQ, gw.AMQN):
    method = adaptive(updates=(0,))
    TABLE[method.name] = [
        Case(method, gather(3.2), variance=fitted(method), constants=False, symmetric=False),
    ]

histogram = gw.ALQ(updates=(0,), model="histogram", bits=2, norm="max", block_size=16)
TABLE["alq"] += [Case(histogram, gather(2 + 32 / 16), variance=fitted(histogram), symmetric=False)]
histogram = gw.AMQN(updates=(0,), model="histogram", bits=4, block_size=None, blocks="parameter")
TABLE["amq_n"] += [Case(histogram, gather(4), variance=fitted(histogram), constants=False, symmetric=False)]
overlapping = gw.AMQ(updates=(0,), blocks="parameter", block_size=512, overlap=True)
TABLE["amq"] += [
    Case(
        overlapping,
        gather(3.2 + 32 / 512),
        variance=fitted(overlapping),
        constants=False,
        symmetric=False,
        memory=True,
    )
]

DIFFERING: dict[str, list[gw.Method]] = {
    "dpsgd": [gw.DPSGD(), gw.DPSGD(graph="exponential", every=2)],
    "choco_sgd": [
        gw.ChocoSGD(),
        gw.ChocoSGD(compressor=gw.TopK(density=0.05), gamma=0.1),
        gw.ChocoSGD(graph="exponential", compressor=gw.RandK(density=0.1, coordinates="private"), gamma=0.1),
    ],
    "power_gossip": [gw.PowerGossip(), gw.PowerGossip(matrix_rank=2, iterations=3, least_saving=2.0, every=4)],
}
"""Methods whose outcome each rank has for itself: what the shared tests hold others to, a mean, they have not.
Properties of theirs are in ``methods/test_gossip.py`` and ``link/test_gossip.py``."""


def adds_up(method: gw.Method) -> bool:
    """Return whether a method remembers sums of what it exchanges, or exchanges parameters: it has a range."""
    return method.traits.needs_loss_scale and bool(method.traits.remembers or method.traits.local_steps)


CASES: dict[str, list[gw.Method]] = {name: [case.method for case in row] for name, row in TABLE.items()} | DIFFERING
ALL_CASES = [case for row in TABLE.values() for case in row]
ALL = [case.method for case in ALL_CASES]
EVERY = [method for row in CASES.values() for method in row]
COMPRESSORS = [m for m in ALL if m.properties.bit_stable]
