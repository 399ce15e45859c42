"""Operators on a flat vector: codec mathematics, no communication, no memory."""

from gradwire.compressors.base import CheckedCodec, Codec, Compressor, Draw, SummableCodec, Summary
from gradwire.compressors.cast import BF16, FP16, FP32, Cast
from gradwire.compressors.dense import DenseCodec, NoSummary
from gradwire.compressors.lattice import Lattice
from gradwire.compressors.levels import LevelCodec, LevelSummary, check_blocks
from gradwire.compressors.mask import MaskCodec
from gradwire.compressors.natural import Natural
from gradwire.compressors.natural_dithering import NaturalDithering
from gradwire.compressors.nuqsgd import NUQSGD
from gradwire.compressors.qsgd import QSGD, QSGDinf
from gradwire.compressors.qsgd_max_norm import QSGDMaxNorm
from gradwire.compressors.scaledsign import ScaledSign
from gradwire.compressors.shared_levels import SharedLevelCodec
from gradwire.compressors.sides import SideCodec, SideSummary, sign_table
from gradwire.compressors.terngrad import TernGrad
from gradwire.compressors.votes import VoteCodec, zero_throughout

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "NUQSGD",
    "QSGD",
    "Cast",
    "CheckedCodec",
    "Codec",
    "Compressor",
    "DenseCodec",
    "Draw",
    "Lattice",
    "LevelCodec",
    "LevelSummary",
    "MaskCodec",
    "Natural",
    "NaturalDithering",
    "NoSummary",
    "QSGDMaxNorm",
    "QSGDinf",
    "ScaledSign",
    "SharedLevelCodec",
    "SideCodec",
    "SideSummary",
    "SummableCodec",
    "Summary",
    "TernGrad",
    "VoteCodec",
    "check_blocks",
    "sign_table",
    "zero_throughout",
]
