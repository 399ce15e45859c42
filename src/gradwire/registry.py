"""All methods of the package, and their declared properties."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.algorithms.acp_sgd import ACPSGD
from gradwire.algorithms.adaptive_levels import ALQ, ALQN, AMQ, AMQN
from gradwire.algorithms.choco_sgd import ChocoSGD
from gradwire.algorithms.clt_k import CLTk
from gradwire.algorithms.dgc import DGC
from gradwire.algorithms.diana import DIANA, DQGD
from gradwire.algorithms.diloco import DiLoCo
from gradwire.algorithms.dpsgd import DPSGD
from gradwire.algorithms.easgd import EASGD
from gradwire.algorithms.ef21 import EF21
from gradwire.algorithms.ef_signsgd import EFSignSGD
from gradwire.algorithms.error_feedback import ErrorFeedback
from gradwire.algorithms.grandk import GRandK
from gradwire.algorithms.gtopk import GTopK
from gradwire.algorithms.hierarchical import Hierarchical
from gradwire.algorithms.l_greco import LGreCo
from gradwire.algorithms.lgc import LGC
from gradwire.algorithms.local_sgd import LocalSGD
from gradwire.algorithms.multi_scale import MultiScale
from gradwire.algorithms.onebit import OneBit
from gradwire.algorithms.power_gossip import PowerGossip
from gradwire.algorithms.powersgd import PowerSGD
from gradwire.algorithms.rand_k import RandK
from gradwire.algorithms.signsgd import SignSGD, Signum
from gradwire.algorithms.sketched_amsgrad import SketchedAMSGrad
from gradwire.algorithms.sketched_sgd import SketchedSGD
from gradwire.algorithms.sparse_loco import SparseLoCo
from gradwire.algorithms.spectral_atomo import SpectralATOMO
from gradwire.algorithms.streaming_diloco import StreamingDiLoCo
from gradwire.compressors.atomo import ATOMO
from gradwire.compressors.cast import BF16, FP16, FP32
from gradwire.compressors.cat import CAT
from gradwire.compressors.dorefa import DoReFa
from gradwire.compressors.eden import DRIVE, EDEN
from gradwire.compressors.fourier_atomo import FourierATOMO
from gradwire.compressors.lattice import Lattice
from gradwire.compressors.natural import Natural
from gradwire.compressors.natural_dithering import NaturalDithering
from gradwire.compressors.nuqsgd import NUQSGD
from gradwire.compressors.p_quantisation import PQuantisation
from gradwire.compressors.qsgd import QSGD, QSGDinf
from gradwire.compressors.qsgd_max_norm import QSGDMaxNorm
from gradwire.compressors.quic_fl import QUICFL
from gradwire.compressors.scaledsign import ScaledSign
from gradwire.compressors.sidco import SIDCo
from gradwire.compressors.terngrad import TernGrad
from gradwire.compressors.threshold import Threshold
from gradwire.compressors.top_k import TopK
from gradwire.methods import Method
from gradwire.wrappers.coded import Coded
from gradwire.wrappers.rotated import Rotated
from gradwire.wrappers.scheduled import Scheduled

__all__ = [
    "ACPSGD",
    "ALQ",
    "ALQN",
    "AMQ",
    "AMQN",
    "ATOMO",
    "BF16",
    "CAT",
    "DGC",
    "DIANA",
    "DPSGD",
    "DQGD",
    "DRIVE",
    "EASGD",
    "EDEN",
    "EF21",
    "FP16",
    "FP32",
    "LGC",
    "NUQSGD",
    "QSGD",
    "QUICFL",
    "CLTk",
    "ChocoSGD",
    "Coded",
    "DiLoCo",
    "DoReFa",
    "EFSignSGD",
    "ErrorFeedback",
    "FourierATOMO",
    "GRandK",
    "GTopK",
    "Hierarchical",
    "LGreCo",
    "Lattice",
    "LocalSGD",
    "MethodInfo",
    "MultiScale",
    "Natural",
    "NaturalDithering",
    "OneBit",
    "PQuantisation",
    "PowerGossip",
    "PowerSGD",
    "QSGDMaxNorm",
    "QSGDinf",
    "RandK",
    "Rotated",
    "SIDCo",
    "ScaledSign",
    "Scheduled",
    "SignSGD",
    "Signum",
    "SketchedAMSGrad",
    "SketchedSGD",
    "SparseLoCo",
    "SpectralATOMO",
    "StreamingDiLoCo",
    "TernGrad",
    "Threshold",
    "TopK",
    "methods",
]

METHODS: tuple[type[Method], ...] = (
    FP32,
    FP16,
    BF16,
    TernGrad,
    QSGD,
    QSGDinf,
    NUQSGD,
    DoReFa,
    ALQ,
    ALQN,
    AMQ,
    AMQN,
    ErrorFeedback,
    EF21,
    DQGD,
    DIANA,
    Coded,
    QSGDMaxNorm,
    EDEN,
    DRIVE,
    QUICFL,
    Rotated,
    MultiScale,
    Natural,
    NaturalDithering,
    Lattice,
    ScaledSign,
    EFSignSGD,
    SignSGD,
    Signum,
    OneBit,
    PQuantisation,
    GRandK,
    PowerSGD,
    ACPSGD,
    TopK,
    RandK,
    Threshold,
    GTopK,
    ATOMO,
    SpectralATOMO,
    FourierATOMO,
    CAT,
    CLTk,
    DGC,
    SIDCo,
    SketchedSGD,
    SketchedAMSGrad,
    Scheduled,
    LGreCo,
    LGC,
    Hierarchical,
    LocalSGD,
    DiLoCo,
    StreamingDiLoCo,
    SparseLoCo,
    EASGD,
    DPSGD,
    ChocoSGD,
    PowerGossip,
)
"""Every method of the package; adding one adds a line here."""


@dataclass(frozen=True, kw_only=True)
class MethodInfo:
    """A method's declared properties, as ``gradwire methods`` prints them.

    ``omega`` and ``delta`` are numbers that hold whatever the size of a parameter, or None where there is none; the
    formulas say what they are for vectors, or blocks, of d elements. ``paper_spec`` is the method with the settings of
    its paper. The other attributes are those of
    :class:`gradwire.methods.Properties` and :class:`gradwire.methods.Method`.
    """

    name: str
    spec: str
    summary: str
    unbiased: bool
    unbiased_note: str | None
    bits_per_element: float
    omega: float | None
    omega_formula: str | None
    delta: float | None
    delta_formula: str | None
    bit_stable: bool
    state: str
    state_bytes_per_element: float
    stream: str
    collectives: tuple[str, ...]
    paper: str
    paper_spec: str

    @classmethod
    def of(cls, method: Method) -> MethodInfo:
        """Return the declared properties of a method; ``bits_per_element`` and ``state_bytes_per_element`` are
        those of its class's defaults.

        Example:
            >>> MethodInfo.of(QSGDinf(levels=1, block_size=64)).omega
            3.5
        """
        p = type(method).properties
        return cls(
            name=type(method).name,
            spec=repr(method),
            summary=p.summary,
            unbiased=method.unbiased,
            unbiased_note=method.unbiased_note,
            bits_per_element=p.bits_per_element,
            omega=method.omega,
            omega_formula=method.omega_formula,
            delta=method.delta,
            delta_formula=method.delta_formula,
            bit_stable=p.bit_stable,
            state=p.state,
            state_bytes_per_element=p.state_bytes_per_element,
            stream=p.stream,
            collectives=tuple(method.collectives),
            paper=p.paper,
            paper_spec=repr(type(method).paper()),
        )


def methods() -> dict[str, MethodInfo]:
    """Map each method's lower-case name to the declared properties of its default."""
    return {kind.name: MethodInfo.of(kind()) for kind in METHODS}
