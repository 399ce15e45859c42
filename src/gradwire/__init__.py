"""Data-parallel PyTorch training over slow links: gradients packed to a few bits per element, for real."""

from gradwire.adapters import Link, SimulatedLink, Simulation, attach, load, probe, save, simulate, warm_up
from gradwire.catalogue import Auto, MethodInfo, method, methods
from gradwire.compressors import BF16, FP16, FP32, TernGrad
from gradwire.errors import (
    BackendError,
    ExchangeError,
    GradwireError,
    HyperparameterError,
    IncompatibleError,
    PayloadError,
    RankMismatchError,
)
from gradwire.groups import Traffic
from gradwire.methods import Method, Properties
from gradwire.optim import L1, Box, ProximalSGD
from gradwire.version import __version__

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "L1",
    "Auto",
    "BackendError",
    "Box",
    "ExchangeError",
    "GradwireError",
    "HyperparameterError",
    "IncompatibleError",
    "Link",
    "Method",
    "MethodInfo",
    "PayloadError",
    "Properties",
    "ProximalSGD",
    "RankMismatchError",
    "SimulatedLink",
    "Simulation",
    "TernGrad",
    "Traffic",
    "__version__",
    "attach",
    "load",
    "method",
    "methods",
    "probe",
    "save",
    "simulate",
    "warm_up",
]
