"""Sections of a payload: the interface of codecs, and those that any method may need."""

from gradwire.exchange.codecs.base import (
    CheckedCodec,
    Codec,
    Draw,
    LeftOut,
    MergeableCodec,
    SummableCodec,
    Summary,
    check_workers,
    unread,
)
from gradwire.exchange.codecs.constants import Constant
from gradwire.exchange.codecs.dense import DenseCodec, NoSummary
from gradwire.exchange.codecs.scales import SMALLEST_SCALE, usable

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
    "check_workers",
    "unread",
    "usable",
]
