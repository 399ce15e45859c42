"""Data-parallel PyTorch training over slow links: gradients packed to a few bits per element, for real."""

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gradwire.version import __version__

if TYPE_CHECKING:
    # For type checkers and editors. mypy does not follow lists of names through a second module, so all three are here.
    from gradwire import interface
    from gradwire.interface import *  # noqa: F403
    from gradwire.link import adapters
    from gradwire.link.adapters import *  # noqa: F403
    from gradwire.methods import registry
    from gradwire.methods.registry import *  # noqa: F403

    __all__ = ["__version__"]
    __all__ += interface.__all__
    __all__ += adapters.__all__
    __all__ += registry.__all__

# Without it, Gloo asks the store for one address after the other, with three round trips for each. It is set
# here for process groups that are made before any name is used.
os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")


class _Package(ModuleType):
    """This package, whose public names are loaded together, with torch, at the first use of one.

    So a command shows its help, takes its options and ends at Ctrl-C without the seconds that torch takes to import.
    """

    def __getattr__(self, name: str) -> Any:
        interface = import_module("gradwire.interface")
        for each in interface.__all__:
            setattr(self, each, getattr(interface, each))
        self.__all__ = interface.__all__
        try:
            # Modules of this package that are loaded by now are here, too.
            return vars(self)[name]
        except KeyError:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        # Python sets each subpackage as it is imported. ``gradwire.methods`` is the function, and not the subpackage.
        if not (name == "methods" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        """List what users need; modules are imported by their names."""
        return sorted(self.__all__)


sys.modules[__name__].__class__ = _Package
