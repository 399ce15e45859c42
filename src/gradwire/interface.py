"""The public names of gradwire, all loaded at the first use of one: ``gradwire`` itself imports nothing before."""

from gradwire import integrations
from gradwire.errors import (
    BackendError,
    ExchangeError,
    GradwireError,
    HyperparameterError,
    IncompatibleError,
    LeftOutError,
    PayloadError,
    RankMismatchError,
)
from gradwire.exchange.drivers import Traffic
from gradwire.exchange.method import Method, Properties
from gradwire.exchange.network_cost import LinkCost
from gradwire.exchange.traits import Traits
from gradwire.graphs import CDFGNN, VARCO, Halo, Isolated, halo_method
from gradwire.link import adapters
from gradwire.link.adapters import *  # noqa: F403
from gradwire.methods import registry
from gradwire.methods.auto import Auto
from gradwire.methods.registry import *  # noqa: F403
from gradwire.methods.spec import method, register
from gradwire.optim import L1, Box, ProximalSGD
from gradwire.publish import Publication, WeightPublisher, WeightSubscriber
from gradwire.version import __version__

__all__: list[str] = [
    "CDFGNN",
    "L1",
    "VARCO",
    "Auto",
    "BackendError",
    "Box",
    "ExchangeError",
    "GradwireError",
    "Halo",
    "HyperparameterError",
    "IncompatibleError",
    "Isolated",
    "LeftOutError",
    "LinkCost",
    "Method",
    "PayloadError",
    "Properties",
    "ProximalSGD",
    "Publication",
    "RankMismatchError",
    "Traffic",
    "Traits",
    "WeightPublisher",
    "WeightSubscriber",
    "__version__",
    "halo_method",
    "integrations",
    "method",
    "register",
]
__all__ += adapters.__all__
__all__ += registry.__all__
