"""The settings in which the trial of messages takes every method."""

from __future__ import annotations

import gradwire as gw

__all__ = ["settings"]

SETTINGS = {
    "terngrad": (
        "TernGrad()",
        "TernGrad(clip=None)",
        "TernGrad(clip=1.0)",
        "TernGrad(clip_by='std')",
        "TernGrad(share_scaler=False)",
        "TernGrad(ahead=True)",
    ),
    "qsgd": (
        "QSGD()",
        "QSGD(levels=3, block_size=64, blocks='model')",
    ),
    "qsgdinf": (
        "QSGDinf()",
        "QSGDinf(levels=1, block_size=None)",
    ),
    "nuqsgd": (
        "NUQSGD()",
        "NUQSGD(levels=4, zero=False, norm='max', block_size=80)",
    ),
    "dorefa": (
        "DoReFa()",
        "DoReFa(bits=2, block_size=None)",
        "DoReFa(bits=1, block_size=64, blocks='model')",
    ),
    "qsgdmaxnorm": (
        "QSGDMaxNorm()",
        "QSGDMaxNorm(levels=7, block_size=48)",
        "QSGDMaxNorm(levels=1, blocks='model')",
    ),
    "multiscale": (
        "MultiScale()",
        "MultiScale(levels=(7, 21, 90), block_size=48)",
    ),
    "eden": (
        "EDEN()",
        "EDEN(bits=1, block_size=256)",
        "EDEN(bits=1.6, block_size=512)",
        "EDEN(bits=0.5)",
    ),
    "drive": (
        "DRIVE()",
        "DRIVE(least_error=True, block_size=512)",
    ),
    "quic_fl": (
        "QUICFL()",
        "QUICFL(bits=1, block_size=512)",
    ),
    "rotated": (
        "Rotated()",
        "Rotated(compressor=QSGDinf(levels=3, block_size=64), block_size=256)",
        "Rotated(compressor=ScaledSign(), block_size=512)",
    ),
    "powersgd": (
        "PowerSGD()",
        "PowerSGD(values=BF16())",
        "PowerSGD(values=QSGDinf(block_size=256))",
    ),
    "acp_sgd": (
        "ACPSGD()",
        "ACPSGD(values=QSGDMaxNorm())",
    ),
    "naturaldithering": (
        "NaturalDithering()",
        "NaturalDithering(levels=3, norm='max', block_size=64)",
    ),
    "lattice": (
        "Lattice()",
        "Lattice(colours=256, distance=60.0)",
    ),
    "errorfeedback": (
        "ErrorFeedback()",
        "ErrorFeedback(compressor=GRandK(cycle=4))",
    ),
    "ef21": (
        "EF21()",
        "EF21(compressor=QSGDinf(block_size=256))",
    ),
    "topk": (
        "TopK()",
        "TopK(density=0.0625, block_size=256, values=BF16())",
        "TopK(density=0.1, blocks='model', values=QSGDinf(levels=1, block_size=64))",
    ),
    "randk": (
        "RandK()",
        "RandK(density=0.25, coordinates='private', rescale=True)",
        "RandK(density=0.1, contiguous=True, values=QSGDinf(block_size=64))",
        "RandK(density=0.1, coordinates='private', contiguous=True)",
    ),
    "threshold": (
        "Threshold()",
        "Threshold(threshold=2.0)",
    ),
    "atomo": (
        "ATOMO(density=0.2)",
        "ATOMO(norm='max')",
    ),
    "cat": (
        "CAT()",
        "CAT(scheme='sign', packet_bytes=256, blocks='parameter')",
        "CAT(scheme='stochastic', blocks='parameter')",
    ),
    "fourier_atomo": (
        "FourierATOMO(density=0.2, block_size=256)",
        "FourierATOMO(density=0.05)",
    ),
    "gtopk": (
        "GTopK()",
        "GTopK(density=0.05, blocks='parameter', values=BF16())",
        "GTopK(density=0.05, values=QSGDinf(levels=3, block_size=64))",
    ),
    "clt_k": (
        "CLTk()",
        "CLTk(beta=0.5, momentum=0.5)",
    ),
    "lgc": (
        "LGC(density=0.05, full_rounds=0, training_rounds=1)",
        "LGC(density=0.05, instance='parameter_server', full_rounds=0, training_rounds=1, feedback='reconstruction', "
        "order='index', innovation=0.01, optimizer='sgd')",
    ),
    "rank_curve": (
        "RankCurve(density=0.05, full_rounds=0, training_rounds=1)",
        "RankCurve(density=0.05, full_rounds=0, training_rounds=1, feedback='reconstruction')",
    ),
    "sketched_sgd": (
        "SketchedSGD()",
        "SketchedSGD(rows=3, columns=97, density=0.02, candidates=2, momentum=0.5)",
    ),
    "sketched_amsgrad": (
        "SketchedAMSGrad()",
        "SketchedAMSGrad(beta1=0.5, eps=0.01, rows=3, columns=97, density=0.02, candidates=2)",
    ),
    "sidco": (
        "SIDCo()",
        "SIDCo(model='gamma', stages=2, blocks='model', values=BF16())",
    ),
    "dgc": (
        "DGC()",
        "DGC(momentum=0.5, nesterov=True, clip_norm=1000000.0, warmup_rounds=3)",
    ),
    "scheduled": (
        "Scheduled()",
        "Scheduled(compressor=QSGDinf(), field='levels', start=1, schedule='linear', rounds=100000)",
        "Scheduled(compressor=ErrorFeedback(compressor=TopK()), start=(0.5, 0.1), schedule='step', rounds=3, stages=2)",
    ),
    "async_server": (
        "AsyncServer()",
        "AsyncServer(inner=QSGDinf(block_size=64), staleness=0)",
    ),
    "hierarchical": (
        "Hierarchical(node_size=1)",
        "Hierarchical(compressor=QSGDinf(block_size=64), node_size=1)",
    ),
    "local_sgd": (
        "LocalSGD()",
        "LocalSGD(inner=QSGDinf(block_size=64))",
    ),
    "l_greco": (
        "LGreCo()",
        "LGreCo(compressor=TopK(density=0.1), field='density', values=(0.01, 0.03, 0.3), every=1)",
        "LGreCo(compressor=QSGD(levels=5, block_size=64), values=(2, 17), every=1)",
    ),
    "coded": (
        "Coded()",
        "Coded(compressor=QSGD(), coder='huffman')",
        "Coded(compressor=EDEN(bits=1.5, block_size=1024, spacing='uniform'), coder='rans')",
        "Coded(compressor=TopK(density=0.1), coder='huffman')",
        "Coded(compressor=BF16())",
    ),
    "scaledsign": (
        "ScaledSign()",
        "ScaledSign(block_size=112)",
    ),
    "ef_signsgd": (
        "EFSignSGD()",
        "EFSignSGD(momentum=0.5, block_size=64)",
    ),
    "signum": (
        "Signum()",
        "Signum(momentum=0.0)",
    ),
    "onebit": (
        "OneBit()",
        "OneBit(block_size=48)",
    ),
    "p_quantisation": (
        "PQuantisation()",
        "PQuantisation(p=1, block_size=16)",
        "PQuantisation(p='inf', blocks='model')",
    ),
    "grandk": (
        "GRandK()",
        "GRandK(compressor=MultiScale(), cycle=5)",
        "GRandK(compressor=QSGDMaxNorm(blocks='model'), cycle=3, rescale=True)",
    ),
    "alq": (
        "ALQ(updates=(0,))",
        "ALQ(bits=2, norm='max', block_size=16, updates=(0,), model='histogram')",
    ),
    "alq_n": ("ALQN(updates=(0,))",),
    "amq": (
        "AMQ(updates=(0,))",
        "AMQ(block_size=512, blocks='parameter', updates=(0,), overlap=True)",
    ),
    "amq_n": (
        "AMQN(updates=(0,))",
        "AMQN(bits=4, block_size=None, blocks='parameter', updates=(0,), model='histogram')",
    ),
    "dpsgd": (
        "DPSGD()",
        "DPSGD(graph='exponential', every=2)",
    ),
    "choco_sgd": (
        "ChocoSGD()",
        "ChocoSGD(compressor=TopK(density=0.05), gamma=0.1)",
        "ChocoSGD(graph='exponential', compressor=RandK(density=0.1, coordinates='private'), gamma=0.1)",
    ),
    "power_gossip": (
        "PowerGossip()",
        "PowerGossip(matrix_rank=2, iterations=3, least_saving=2.0, every=4)",
    ),
}
"""By the method, so that each of its formats and ways is taken; the others have their defaults.

Those of the tests' table are among them, which a test compares."""


def settings() -> list[gw.Method]:
    """Return every method, in each of its settings."""
    return [gw.method(spec) for name in gw.methods() for spec in SETTINGS.get(name, (name,))]
