"""D-PSGD: workers average their parameters with those of their neighbours in a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradwire.exchange.method import Properties
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.methods.gossip.gossip import GossipMethod, GossipPlan, Mixing, mix

__all__ = ["DPSGD"]


@dataclass(frozen=True, kw_only=True)
class DPSGD(GossipMethod):
    r"""D-PSGD: after its own step each worker averages its parameters with those of its neighbours in a graph.

    With x_i worker i's parameters after ``every`` steps of its optimizer, and w_ij symmetric weights whose rows add up
    to 1, zero where two workers are no neighbours::

        x_i <- sum_j w_ij x_j = x_i + sum_j w_ij (x_j - x_i)

    Nobody waits for more than its neighbours, and traffic does not grow with the number of workers. In exchange,
    workers have different parameters: what they have in common is their mean, which an exchange leaves as it is, and
    which is what to evaluate (``link.global_parameters()``). An exchange multiplies the distance from it by the second
    largest magnitude of an eigenvalue of the weights, or less.

    Args:
        graph: ``"ring"``, ``"torus"`` (a rectangle, as square as the number of workers allows), ``"exponential"``
            (neighbours are 1, 2, 4, ... places away), or the path to a file of edges, see ``docs/methods/gossip.md``.
            The weight of an edge is 1 / (1 + the larger number of neighbours of its ends), unless a file says
            otherwise.
        every: Optimizer steps from one exchange to the next.

    Raises:
        HyperparameterError: a field is out of range.
        IncompatibleError: when attached: there is no such graph of so many workers, or its weights do not mix.

    Wire: parameters in float32, to each neighbour (``docs/wire-format.md``).

    Reference: X. Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for
    Decentralized Parallel Stochastic Gradient Descent", NIPS 2017, algorithm 1, but for the order: the paper averages
    the parameters of before the step, so that the average is on its way while gradients are computed.

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
    kernels: ClassVar[tuple[str, ...]] = ()
    min_numel: ClassVar[int] = 0
    properties: ClassVar[Properties] = Properties(
        summary="Workers average their parameters with those of their neighbours in a graph",
        paper="Lian et al., D-PSGD, NIPS 2017",
        bit_stable=True,
        bits_per_element=2 * 32 * 4 / 6,
    )

    def __post_init__(self) -> None:
        self.check_graph()

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return _AveragePlan(self, setting)


class _AveragePlan(GossipPlan):
    """All of a bucket as it is, to each neighbour."""

    def __init__(self, method: DPSGD, setting: PlanSetting) -> None:
        super().__init__(method, setting)
        self._tag, self._mixing = method.tag, Mixing([s for s in setting.segments if s.numel])

    def run(self, context: Context, flat: torch.Tensor, prepared: None) -> Exchange[Outcome]:
        yield from mix(context, self._tag, self.graph, self._mixing, flat)
        return Outcome(True)
