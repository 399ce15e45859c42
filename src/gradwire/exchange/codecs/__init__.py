"""Codecs of the sections of a payload: their interface, and those that any method may use."""

from gradwire.exchange.codecs.base import (
    SMALLEST_SCALE,
    CheckedCodec,
    Codec,
    Constant,
    Draw,
    LeftOut,
    MergeableCodec,
    SummableCodec,
    Summary,
    check_codec,
    check_workers,
    unread,
    usable,
)
from gradwire.exchange.codecs.dense import DenseCodec, NoSummary

__all__ = [
    "SMALLEST_SCALE",
    "CheckedCodec",
    "Codec",
    "Constant",
    "DenseCodec",
    "Draw",
    "LeftOut",
    "MergeableCodec",
    "NoSummary",
    "SummableCodec",
    "Summary",
    "check_codec",
    "check_workers",
    "unread",
    "usable",
]
