"""Operators on a flat vector, one file each: no communication, no memory."""

from gradwire.compressors.atomo import ATOMO
from gradwire.compressors.base import Compressor
from gradwire.compressors.binned_top_k import BinnedTopK
from gradwire.compressors.cast import BF16, FP16, FP32, Cast
from gradwire.compressors.cat import CAT
from gradwire.compressors.dorefa import DoReFa
from gradwire.compressors.eden import DRIVE, EDEN, RotatedLevels, check_rotation
from gradwire.compressors.lattice import Lattice
from gradwire.compressors.level_compressor import LevelCompressor, check_blocks
from gradwire.compressors.natural import Natural
from gradwire.compressors.natural_dithering import NaturalDithering
from gradwire.compressors.nuqsgd import NUQSGD
from gradwire.compressors.qsgd import QSGD, QSGDinf
from gradwire.compressors.qsgd_max_norm import QSGDMaxNorm
from gradwire.compressors.quic_fl import QUICFL
from gradwire.compressors.scaledsign import ScaledSign
from gradwire.compressors.sidco import SIDCo
from gradwire.compressors.sparse import Sparse, check_values, sparse_values
from gradwire.compressors.terngrad import TernGrad
from gradwire.compressors.threshold import Threshold
from gradwire.compressors.top_k import TopK, check_density

__all__ = [
    "ATOMO",
    "BF16",
    "CAT",
    "DRIVE",
    "EDEN",
    "FP16",
    "FP32",
    "NUQSGD",
    "QSGD",
    "QUICFL",
    "BinnedTopK",
    "Cast",
    "Compressor",
    "DoReFa",
    "Lattice",
    "LevelCompressor",
    "Natural",
    "NaturalDithering",
    "QSGDMaxNorm",
    "QSGDinf",
    "RotatedLevels",
    "SIDCo",
    "ScaledSign",
    "Sparse",
    "TernGrad",
    "Threshold",
    "TopK",
    "check_blocks",
    "check_density",
    "check_rotation",
    "check_values",
    "sparse_values",
]
