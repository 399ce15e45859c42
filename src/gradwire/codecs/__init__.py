"""Payload machinery that operators share: a section of a payload, its layout in bytes, and its arithmetic."""

from gradwire.codecs.base import CheckedCodec, Codec, Draw, SummableCodec, Summary, check_workers
from gradwire.codecs.dense import DenseCodec, NoSummary
from gradwire.codecs.lattice import LatticeCodec, LatticeSummary
from gradwire.codecs.levels import LevelCodec, LevelSummary, as_levels
from gradwire.codecs.majority_vote import MajorityVoteCodec, zero_throughout
from gradwire.codecs.minimum import MinimumCodec
from gradwire.codecs.natural import NaturalCodec
from gradwire.codecs.rotated_levels import RotatedLevelCodec, RotatedSummary
from gradwire.codecs.scales import SMALLEST_SCALE, usable
from gradwire.codecs.shared_levels import MOST_SUM, SharedLevelCodec
from gradwire.codecs.signs import SignCodec, SignSummary, sign_table
from gradwire.codecs.ternary import TernaryCodec, TernarySummary

__all__ = [
    "MOST_SUM",
    "SMALLEST_SCALE",
    "CheckedCodec",
    "Codec",
    "DenseCodec",
    "Draw",
    "LatticeCodec",
    "LatticeSummary",
    "LevelCodec",
    "LevelSummary",
    "MajorityVoteCodec",
    "MinimumCodec",
    "NaturalCodec",
    "NoSummary",
    "RotatedLevelCodec",
    "RotatedSummary",
    "SharedLevelCodec",
    "SignCodec",
    "SignSummary",
    "SummableCodec",
    "Summary",
    "TernaryCodec",
    "TernarySummary",
    "as_levels",
    "check_workers",
    "sign_table",
    "usable",
    "zero_throughout",
]
