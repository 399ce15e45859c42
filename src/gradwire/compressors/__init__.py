"""Operators on a flat vector: codec mathematics, no communication, no memory."""

from gradwire.compressors.base import Codec, Compressor, Draw, Summary
from gradwire.compressors.cast import BF16, FP16, FP32, Cast
from gradwire.compressors.dense import DenseCodec, NoSummary
from gradwire.compressors.levels import LevelCodec, LevelSummary, check_blocks
from gradwire.compressors.nuqsgd import NUQSGD
from gradwire.compressors.qsgd import QSGD, QSGDinf
from gradwire.compressors.scaledsign import ScaledSign
from gradwire.compressors.sides import SideCodec, SideSummary
from gradwire.compressors.terngrad import TernGrad
from gradwire.compressors.votes import VoteCodec

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "NUQSGD",
    "QSGD",
    "Cast",
    "Codec",
    "Compressor",
    "DenseCodec",
    "Draw",
    "LevelCodec",
    "LevelSummary",
    "NoSummary",
    "QSGDinf",
    "ScaledSign",
    "SideCodec",
    "SideSummary",
    "Summary",
    "TernGrad",
    "VoteCodec",
    "check_blocks",
]
