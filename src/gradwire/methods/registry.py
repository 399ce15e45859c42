"""Registry of all methods of the package, and their declared properties."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.exchange.method import Method
from gradwire.methods.atoms.atomo import ATOMO
from gradwire.methods.atoms.fourier_atomo import FourierATOMO
from gradwire.methods.atoms.spectral_atomo import SpectralATOMO
from gradwire.methods.casts.cast import BF16, FP16, FP32
from gradwire.methods.feedback.diana import DIANA, DQGD
from gradwire.methods.feedback.ef21 import EF21
from gradwire.methods.feedback.error_feedback import ErrorFeedback
from gradwire.methods.gossip.choco_sgd import ChocoSGD
from gradwire.methods.gossip.gossip import DPSGD
from gradwire.methods.gossip.power_gossip import PowerGossip
from gradwire.methods.lattice.lattice import Lattice
from gradwire.methods.learned.lgc import LGC
from gradwire.methods.learned.rank_curve import RankCurve
from gradwire.methods.levels.adaptive_levels import ALQ, ALQN, AMQ, AMQN
from gradwire.methods.levels.dorefa import DoReFa
from gradwire.methods.levels.multi_scale import MultiScale
from gradwire.methods.levels.nuqsgd import NUQSGD, NaturalDithering
from gradwire.methods.levels.p_quantisation import PQuantisation
from gradwire.methods.levels.qsgd import QSGD, QSGDinf
from gradwire.methods.levels.qsgd_max_norm import QSGDMaxNorm
from gradwire.methods.local_steps.diloco import DiLoCo, StreamingDiLoCo
from gradwire.methods.local_steps.easgd import EASGD
from gradwire.methods.local_steps.local_sgd import LocalSGD
from gradwire.methods.local_steps.sparse_loco import SparseLoCo
from gradwire.methods.low_rank.acp_sgd import ACPSGD
from gradwire.methods.low_rank.powersgd import PowerSGD
from gradwire.methods.natural.natural import Natural
from gradwire.methods.rotations.eden import DRIVE, EDEN
from gradwire.methods.rotations.quic_fl import QUICFL
from gradwire.methods.rotations.rotated import Rotated
from gradwire.methods.signs.ef_signsgd import EFSignSGD, ScaledSign
from gradwire.methods.signs.onebit import OneBit
from gradwire.methods.signs.signsgd import SignSGD, Signum
from gradwire.methods.sketches.sketched_amsgrad import SketchedAMSGrad
from gradwire.methods.sketches.sketched_sgd import SketchedSGD
from gradwire.methods.sparse.cat import CAT
from gradwire.methods.sparse.clt_k import CLTk
from gradwire.methods.sparse.dgc import DGC
from gradwire.methods.sparse.grandk import GRandK
from gradwire.methods.sparse.gtopk import GTopK
from gradwire.methods.sparse.rand_k import RandK
from gradwire.methods.sparse.sidco import SIDCo
from gradwire.methods.sparse.top_k import Threshold, TopK
from gradwire.methods.ternary.terngrad import TernGrad
from gradwire.methods.wrappers.async_server import AsyncServer
from gradwire.methods.wrappers.coded import Coded
from gradwire.methods.wrappers.hierarchical import Hierarchical
from gradwire.methods.wrappers.l_greco import LGreCo
from gradwire.methods.wrappers.scheduled import Scheduled

__all__: list[str] = [
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
    "AsyncServer",
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
    "RankCurve",
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
    RankCurve,
    Hierarchical,
    AsyncServer,
    LocalSGD,
    DiLoCo,
    StreamingDiLoCo,
    SparseLoCo,
    EASGD,
    DPSGD,
    ChocoSGD,
    PowerGossip,
)
"""Every method of the package. A new method is added here."""


@dataclass(frozen=True, kw_only=True)
class MethodInfo:
    """A method's declared properties, as ``gradwire methods`` prints them.

    ``omega`` and ``delta`` are numbers that hold for parameters of any size, or None if there are none; the formulas
    are for vectors, or blocks, of d elements. ``paper_spec`` is the spec with the settings of the method's paper. The
    other attributes are those of :class:`gradwire.exchange.method.Properties` and
    :class:`gradwire.exchange.method.Method`.
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
        those of the class's defaults.

        Example:
            >>> MethodInfo.of(QSGDinf(levels=1, block_size=64)).omega
            3.5
        """
        p = type(method).properties
        return cls(
            name=type(method).name,
            spec=repr(method),
            summary=p.summary,
            unbiased=method.traits.unbiased,
            unbiased_note=method.traits.unbiased_note,
            bits_per_element=p.bits_per_element,
            omega=method.omega,
            omega_formula=method.traits.omega_formula,
            delta=method.delta,
            delta_formula=method.delta_formula,
            bit_stable=p.bit_stable,
            state=p.state,
            state_bytes_per_element=p.state_bytes_per_element,
            stream=p.stream,
            collectives=tuple(method.traits.collectives),
            paper=p.paper,
            paper_spec=repr(type(method).paper()),
        )


def methods() -> dict[str, MethodInfo]:
    """Map each method's lower-case name to the declared properties of its default."""
    return {kind.name: MethodInfo.of(kind()) for kind in METHODS}
