"""Methods that keep state between rounds: each of them, and settings with which they keep more."""

from __future__ import annotations

import gradwire as gw

REMEMBERING = [
    gw.method(spec)
    for spec in (
        "diana",
        "DIANA(momentum=0.5)",
        "ef21",
        "EF21(momentum=0.5)",
        "errorfeedback",
        "ErrorFeedback(compressor=GRandK(cycle=4))",
        "ef_signsgd",
        "EFSignSGD(block_size=64, momentum=0.5)",
        "onebit",
        "powersgd",
        "acp_sgd",
        "ACPSGD(values=BF16())",
        "gtopk",
        "clt_k",
        "lgc",
        "LGC(density=0.1, full_rounds=0, training_rounds=1)",
        "LGC(instance='parameter_server', density=0.1, full_rounds=0, training_rounds=1)",
        "rank_curve",
        "RankCurve(density=0.1, full_rounds=0, training_rounds=1)",
        "RankCurve(density=0.1, full_rounds=0, training_rounds=1, feedback='reconstruction')",
        "dgc",
        "DGC(density=0.1, clip_norm=1.0, warmup_rounds=1)",
        "sketched_sgd",
        "SketchedSGD(momentum=0.5)",
        "sketched_amsgrad",
        "signum",
        "ALQ()",
        "ALQN()",
        "AMQ()",
        "AMQN()",
        "Coded(compressor=ErrorFeedback())",
        "Hierarchical(compressor=ErrorFeedback(), node_size=1)",
        "Hierarchical(compressor=ALQ(), node_size=1)",
        "AsyncServer(ErrorFeedback(TopK(density=0.1)))",
        "local_sgd",
        "DiLoCo(inner=ErrorFeedback())",
        "StreamingDiLoCo(inner=ErrorFeedback())",
        "SparseLoCo(density=0.05)",
        "easgd",
        "choco_sgd",
        "ChocoSGD(compressor=TopK(density=0.1), gamma=0.1)",
        "power_gossip",
        "PowerGossip(iterations=2)",
        "l_greco",
        "LGreCo(every=1)",
        "ErrorFeedback(compressor=LGreCo(compressor=TopK(), field='density', values=(0.1,), every=2))",
        "Scheduled(compressor=ErrorFeedback(compressor=TopK()), rounds=4)",
    )
]
