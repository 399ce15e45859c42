"""The pilot of a link, from its method and options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gradwire.auto import Auto
from gradwire.methods import Method
from gradwire.planning import Options, Planner
from gradwire.runtime.selection.autotune import Autotuner, FixedSelection, Selection
from gradwire.runtime.selection.fallback import Fallback, check_fallback
from gradwire.runtime.warn_once import say_compiled
from gradwire.spec import method as read_method

__all__ = ["make_selection"]


def make_selection(
    method: Method,
    options: Options,
    planner: Callable[[Method, Options], Planner],
    strayed: Callable[[int], tuple[float, float]],
    wanted: Callable[[int], bool],
    fell: Callable[[str], None],
) -> Selection:
    """Make what says by which method a round travels.

    Args:
        planner: Makes a planner of the link's parameters.
        strayed, wanted, fell: See :class:`Fallback`.

    Raises:
        IncompatibleError: the method cannot do what the options ask.
    """

    def ready(one: Method, its: Options) -> Planner:
        made = planner(one, its)
        made.check()
        say_compiled(made.compile())
        return made

    pilot: Selection
    if isinstance(method, Auto):
        pilot = Autotuner(method, {spec: ready(read_method(spec), options) for spec in method.candidates})
    else:
        pilot = FixedSelection(ready(method, options))
    if options.fallback is None or options.fallback_limit is None:
        return pilot
    check_fallback(method)
    # The collective that was asked for is the method's.
    plain = ready(read_method(options.fallback), replace(options, collective="auto"))
    return Fallback(pilot, plain, options.fallback_limit, strayed, wanted, fell)
