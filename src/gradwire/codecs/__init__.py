"""Payload machinery that operators share: a section of a payload, its layout in bytes, and its arithmetic."""

from gradwire.codecs.adaptive_atoms import AdaptiveAtomCodec
from gradwire.codecs.atom_codec import AtomCodec
from gradwire.codecs.atom_elements import AtomElementCodec
from gradwire.codecs.atoms import kept_magnitude, probabilities
from gradwire.codecs.base import (
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
from gradwire.codecs.bounded_support import BoundedSupportCodec
from gradwire.codecs.cast import CastCodec
from gradwire.codecs.constants import Constant
from gradwire.codecs.dense import DenseCodec, NoSummary
from gradwire.codecs.descent_per_byte import BestRatioRule, MessageCost, descent
from gradwire.codecs.fitted_threshold import SMALL_BLOCK, FittedRule
from gradwire.codecs.fourier_atoms import FourierAtomCodec
from gradwire.codecs.lattice import LatticeCodec, LatticeSummary
from gradwire.codecs.levels import LevelCodec, LevelSummary, as_levels
from gradwire.codecs.majority_vote import MajorityVoteCodec, zero_throughout
from gradwire.codecs.minimum import MinimumCodec
from gradwire.codecs.natural import NaturalCodec
from gradwire.codecs.random_places import RandomElements
from gradwire.codecs.random_sparse import RandomSparseCodec
from gradwire.codecs.rotated_blocks import OwnRotationCodec, RotatedSummary
from gradwire.codecs.rotated_levels import RotatedLevelCodec
from gradwire.codecs.rotated_samples import RotatedSampleCodec
from gradwire.codecs.scales import SMALLEST_SCALE, usable
from gradwire.codecs.shared_levels import MOST_SUM, SharedLevelCodec
from gradwire.codecs.signs import SignCodec, SignSummary, sign_table
from gradwire.codecs.sparse import MOST_UNITS, AboveRule, LargestRule, Rule, SparseCodec, SparseSummary, choose_above
from gradwire.codecs.sparse_values import BinnedValues, CastValues, CodedValues, KeptValues, NoValues, SignedValues
from gradwire.codecs.tail_fits import MODELS
from gradwire.codecs.ternary import TernaryCodec, TernarySummary
from gradwire.codecs.units import UnitTable

__all__ = [
    "MODELS",
    "MOST_SUM",
    "MOST_UNITS",
    "SMALLEST_SCALE",
    "SMALL_BLOCK",
    "AboveRule",
    "AdaptiveAtomCodec",
    "AtomCodec",
    "AtomElementCodec",
    "BestRatioRule",
    "BinnedValues",
    "BoundedSupportCodec",
    "CastCodec",
    "CastValues",
    "CheckedCodec",
    "Codec",
    "CodedValues",
    "Constant",
    "DenseCodec",
    "Draw",
    "FittedRule",
    "FourierAtomCodec",
    "KeptValues",
    "LargestRule",
    "LatticeCodec",
    "LatticeSummary",
    "LeftOut",
    "LevelCodec",
    "LevelSummary",
    "MajorityVoteCodec",
    "MergeableCodec",
    "MessageCost",
    "MinimumCodec",
    "NaturalCodec",
    "NoSummary",
    "NoValues",
    "OwnRotationCodec",
    "RandomElements",
    "RandomSparseCodec",
    "RotatedLevelCodec",
    "RotatedSampleCodec",
    "RotatedSummary",
    "Rule",
    "SharedLevelCodec",
    "SignCodec",
    "SignSummary",
    "SignedValues",
    "SparseCodec",
    "SparseSummary",
    "SummableCodec",
    "Summary",
    "TernaryCodec",
    "TernarySummary",
    "UnitTable",
    "as_levels",
    "check_workers",
    "choose_above",
    "descent",
    "kept_magnitude",
    "probabilities",
    "sign_table",
    "unread",
    "usable",
    "zero_throughout",
]
