"""The pilot of a link, from its method and options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gradwire import catalogue
from gradwire.adapters.guard import Guard, check_fallback
from gradwire.adapters.notices import say_compiled
from gradwire.adapters.pilot import Chooser, Fixed, Pilot
from gradwire.catalogue import Auto
from gradwire.methods import Method
from gradwire.planning import Options, Planner

__all__ = ["make_pilot"]


def make_pilot(
    method: Method,
    options: Options,
    planner: Callable[[Method, Options], Planner],
    strayed: Callable[[int], tuple[float, float]],
    wanted: Callable[[int], bool],
    fell: Callable[[str], None],
) -> Pilot:
    """Make what says by which method a round travels.

    Args:
        planner: Makes a planner of the link's parameters.
        strayed, wanted, fell: See :class:`Guard`.

    Raises:
        IncompatibleError: the method cannot do what the options ask.
    """

    def ready(one: Method, its: Options) -> Planner:
        made = planner(one, its)
        made.check()
        say_compiled(made.compile())
        return made

    pilot: Pilot
    if isinstance(method, Auto):
        pilot = Chooser(method, {spec: ready(catalogue.method(spec), options) for spec in method.candidates})
    else:
        pilot = Fixed(ready(method, options))
    if options.fallback is None or options.fallback_limit is None:
        return pilot
    check_fallback(method)
    # The collective that was asked for is the method's.
    plain = ready(catalogue.method(options.fallback), replace(options, collective="auto"))
    return Guard(pilot, plain, options.fallback_limit, strayed, wanted, fell)
