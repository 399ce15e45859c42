"""Build the selection of a link from its method and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from gradwire.exchange.method import Method
from gradwire.exchange.planning import Options, Planner
from gradwire.exchange.protocols import REDUCE_SCATTER
from gradwire.link.selection.autotune import Autotuner, FixedSelection, Selection
from gradwire.link.selection.coder import CoderSelection
from gradwire.link.selection.fallback import Fallback, MeasuredErrors, check_fallback
from gradwire.link.warn_once import WarnOnce
from gradwire.methods.auto import Auto
from gradwire.methods.spec import method as read_method
from gradwire.seeds import LinkNumber

__all__ = ["make_selection"]


def _plain(options: Options) -> Options:
    """Return the options of a fallback: by whichever collective it takes, but for one that leaves ranks shards."""
    return options if options.collective == REDUCE_SCATTER else replace(options, collective="auto")


def make_selection(
    method: Method,
    options: Options,
    parameters: Mapping[str, torch.Tensor],
    world_size: int,
    errors: MeasuredErrors,
    coders: CoderSelection,
    number: LinkNumber,
    warnings: WarnOnce,
) -> Selection:
    """Return what says by which method a round travels.

    Args:
        method: Of the link.
        options: Of the link.
        parameters: That are exchanged, by name.
        world_size: Ranks that take part.
        errors: Of what the method sends, for a fallback.
        coders: Settles what methods leave open, before the first round.
        number: Of the link.
        warnings: Of the link.

    Raises:
        IncompatibleError: the method cannot do what the options ask.
    """

    compiled_s: list[float] = []

    def ready(one: Method, its: Options) -> Planner:
        made = coders.watch(Planner(one, parameters, world_size, its, number))
        made.check()
        compiled_s.append(made.compile())
        return made

    chosen: Selection
    if isinstance(method, Auto):
        chosen = Autotuner(method, {spec: ready(read_method(spec), options) for spec in method.candidates})
    else:
        chosen = FixedSelection(ready(method, options))
    if options.fallback is not None and options.fallback_limit is not None:
        check_fallback(method)
        # The collective that was asked for is the method's.
        plain = ready(read_method(options.fallback), _plain(options))
        chosen = Fallback(chosen, plain, options.fallback_limit, errors)
    warnings.compiled(sum(compiled_s))
    return chosen
