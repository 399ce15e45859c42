"""Base of methods whose workers exchange parameters only with their neighbours in a graph, and D-PSGD."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from gradwire.exchange.codecs import DenseCodec, NoSummary
from gradwire.exchange.method import Method, Properties, is_whole, require
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.protocols.direct import tell_neighbours
from gradwire.exchange.protocols.payloads import Section, draw_of, encode, sized, whole_rows
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.methods.gossip.graphs import GRAPHS, MixingMatrix, graph_of, is_special
from gradwire.methods.wrappers.wrapper import pieces

if TYPE_CHECKING:
    from typing_extensions import Self

GRAPH = "graph"
"""Name of the stored value by which a method recognises that its state belongs to this graph."""


class GossipMethod(Method):
    """Base of methods whose workers average their parameters with their neighbours' after their own steps.

    Not a dataclass, so that each method's own fields keep their order in its spec.
    """

    graph: str
    every: int
    _matrix: ClassVar[MixingMatrix | None] = None

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=("gossip",),
            needs_loss_scale=True,
            # Number of optimizer steps between exchanges.
            local_steps=self.every,
            outcomes_differ=True,
            unbiased=False,
            unbiased_note="no; the mean over workers stays",
        )

    def check_graph(self) -> None:
        """Check the common fields.

        Raises:
            HyperparameterError: ``every`` is out of range, or ``graph`` is not a string.
        """
        owner = type(self).__name__
        require(is_whole(self.every, 1), owner, f"every is at least 1 step, not {self.every!r}")
        known = ", ".join(map(repr, GRAPHS))
        named = isinstance(self.graph, str) and bool(self.graph)
        found = named and (self.graph in GRAPHS or not is_special(self.graph))
        require(found, owner, f"graph is one of {known}, or the path to a file, not {self.graph!r}")

    def with_files(self, world_size: int) -> Self:
        found = copy(self)
        object.__setattr__(found, "_matrix", graph_of(self.graph, world_size))
        return found

    def matrix(self, world_size: int) -> MixingMatrix:
        """Return the weights of the graph, which :meth:`with_files` has read or which are read now.

        Raises:
            IncompatibleError: there is no such graph of so many workers.
        """
        found = self._matrix
        return found if found is not None and found.workers == world_size else graph_of(self.graph, world_size)

    def terms(self, world_size: int) -> Mapping[str, object]:
        return {"graph": self.matrix(world_size).digest()}

    def check_optimizer(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        # Workers may use any optimizer.
        return

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        # Gradients of warm-up rounds: all workers need the mean, so that they start with the same parameters.
        return super().dense_plan(replace(setting, collective="two_shot"))


class Mixing:
    """Part of a bucket whose values are sent uncompressed: ``x_i <- x_i + sum_j w_ij (x_j - x_i)``.

    Both ends of an edge add exactly opposite terms, and workers that agree stay as they are, bit for bit.

    Args:
        segments: Segments of the part.

    Attributes:
        codec: Codec of the part, for one worker.
    """

    def __init__(self, segments: list[Segment]) -> None:
        self.codec = DenseCodec(segments, 1)

    def read(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Write a worker's values into ``out``."""
        self.codec.decode_rows(data.view(1, -1), NoSummary(), out)

    def pull(self, data: torch.Tensor, weight: float, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Add ``weight (x_j - x_i)`` to ``out``, with x_j in a worker's ``data`` and x_i in ``flat``."""
        values, at = data.view(torch.float32), 0
        for begin, n in self.codec.runs:
            for a, b in pieces([(begin, begin + n)], flat):
                # Products are rounded before they are added: with fused operations, bits could depend on the place.
                out[a:b].add_(values[at : at + b - a].sub(flat[a:b]).mul_(weight))
                at += b - a

    def move(self, flat: torch.Tensor, pull: torch.Tensor) -> None:
        """Add the sum over neighbours."""
        for a, n in self.codec.runs:
            flat[a : a + n].add_(pull[a : a + n])


class GossipPlan(BucketPlan):
    """Base of plans that exchange a bucket of parameters with neighbours, in one chunk.

    Attributes:
        graph: The graph of workers with its weights.
    """

    chunks = 1
    collective = "gossip"

    def __init__(self, method: GossipMethod, setting: PlanSetting) -> None:
        self.setting, self.graph = setting, method.matrix(setting.world_size)
        self.runs = [[]]

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[None]:
        return
        yield

    @abstractmethod
    def run(self, context: Context, flat: torch.Tensor, prepared: None) -> Exchange[Outcome]:
        """Replace a worker's own parameters in ``flat`` by those after the exchange."""

    def remembers_this_graph(self, context: Context) -> bool:
        """Return whether the state belongs to this graph and its workers; from the next round on it does."""
        memory, mine = context.memory, self.graph.digest()
        before = memory.value(GRAPH)
        memory.stage_value(GRAPH, torch.tensor(mine, device="cpu"))
        if before is not None and int(before) != mine:
            context.warn(GRAPH, "what was remembered is of another graph, or of other workers: it begins anew")
        return before is not None and int(before) == mine


def mix(
    context: Context,
    tag: int,
    graph: MixingMatrix,
    mixing: Mixing,
    flat: torch.Tensor,
    seen: Callable[[int, torch.Tensor], None] | None = None,
) -> Exchange[None]:
    """Average an uncompressed part of a bucket with the neighbours'.

    Args:
        seen: ``seen(neighbour, values)`` is called with each neighbour's values, laid out as the bucket.
    """
    sections = sized([Section(mixing.codec, NoSummary())], flat)
    layout = whole_rows(context, sections)
    bodies = encode(context, sections, flat, [s.codec.units for s in sections], draw_of(context))
    pull = floats(context, "pull", flat.numel()).zero_()

    def take(neighbour: int, parts: list[torch.Tensor]) -> None:
        if flat.is_meta:
            return
        if seen is not None:
            theirs = floats(context, "theirs", flat.numel())
            mixing.read(parts[0], theirs)
            seen(neighbour, theirs)
        mixing.pull(parts[0], graph.weight(context.rank, neighbour), flat, pull)

    yield from tell_neighbours(context, tag, graph.moves(context.rank), layout, bodies, take)
    if not flat.is_meta:
        mixing.move(flat, pull)


def floats(context: Context, name: str, numel: int) -> torch.Tensor:
    """Return a float32 buffer of a job that is kept between rounds, with its old content."""
    return context.workspace.get(name, 4 * numel).view(torch.float32)


@dataclass(frozen=True, kw_only=True)
class DPSGD(GossipMethod):
    r"""D-PSGD: after its own step each worker averages its parameters with those of its neighbours in a graph.

    With x_i worker i's parameters after ``every`` steps of its optimizer, and w_ij symmetric weights whose rows add up
    to 1, zero if two workers are not neighbours::

        x_i <- sum_j w_ij x_j = x_i + sum_j w_ij (x_j - x_i)

    Workers wait only for their neighbours, and traffic does not grow with the number of workers. But workers have
    different parameters. An exchange does not change their mean, which is what to evaluate
    (``link.global_parameters()``), and multiplies the distance from it by at most the second largest magnitude of an
    eigenvalue of the weights.

    Args:
        graph: ``"ring"``, ``"torus"`` (a rectangle, as square as the number of workers allows), ``"exponential"``
            (neighbours are 1, 2, 4, ... places away), or the path to a file of edges, see ``docs/methods/gossip.md``.
            The weight of an edge is 1 / (1 + the larger number of neighbours of its ends), unless the file gives
            weights.
        every: Number of optimizer steps between exchanges.

    Raises:
        HyperparameterError: a field is out of range.
        IncompatibleError: when attached, if there is no such graph of so many workers, or its weights do not mix.

    Wire: parameters in float32, to each neighbour (``docs/wire-format.md``).

    Reference: X. Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for
    Decentralized Parallel Stochastic Gradient Descent", NIPS 2017, algorithm 1 except for the order: the paper averages
    the parameters before the step, while gradients are computed.

    Example:
        >>> import torch, gradwire as gw
        >>> workers = [torch.nn.Parameter(torch.tensor([float(3 * i)])) for i in range(4)]
        >>> steps = gw.SimulatedLocalSteps([[("x", x)] for x in workers], "DPSGD(graph='ring')")
        >>> steps.after_step()
        >>> [round(x.item(), 4) for x in workers]
        [4.0, 3.0, 6.0, 5.0]
    """

    graph: str = "ring"
    every: int = 1

    name: ClassVar[str] = "dpsgd"
    tag: ClassVar[int] = 50
    properties: ClassVar[Properties] = Properties(
        summary="Workers average their parameters with those of their neighbours in a graph",
        paper="Lian et al., D-PSGD, NIPS 2017",
        bit_stable=True,
        bits_per_element=2 * 32 * 4 / 6,
    )

    def __post_init__(self) -> None:
        self.check_graph()

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            kernels=(),
            min_numel=0,
        )

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return _AveragePlan(self, setting)


class _AveragePlan(GossipPlan):
    """Plan that sends a whole bucket uncompressed to each neighbour."""

    def __init__(self, method: DPSGD, setting: PlanSetting) -> None:
        super().__init__(method, setting)
        self._tag, self._mixing = method.tag, Mixing([s for s in setting.segments if s.numel])

    def run(self, context: Context, flat: torch.Tensor, prepared: None) -> Exchange[Outcome]:
        yield from mix(context, self._tag, self.graph, self._mixing, flat)
        return Outcome(True)
