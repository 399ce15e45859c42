"""The table of methods: one row each. Every shared property runs over every row."""

from __future__ import annotations

import gradwire as gw

CASES: dict[str, list[gw.Method]] = {
    "fp32": [gw.FP32()],
    "fp16": [gw.FP16()],
    "bf16": [gw.BF16()],
    "terngrad": [
        gw.TernGrad(),
        gw.TernGrad(clip=None),
        gw.TernGrad(clip=1.0),
        gw.TernGrad(share_scaler=False),
    ],
}

ALL = [pytest_case for row in CASES.values() for pytest_case in row]
COMPRESSORS = [m for m in ALL if m.properties.bit_stable]
