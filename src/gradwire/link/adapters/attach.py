"""Attach a link to a module that DDP or FSDP2 trains in parallel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method
from gradwire.exchange.planning import Collective, Fallback, KernelBackend, RareOptions, TransportName
from gradwire.link.adapters.ddp import attach_ddp
from gradwire.link.link import Link
from gradwire.link.weight_link import WeightLink

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from typing_extensions import Unpack


def attach(
    module: DistributedDataParallel | FSDPModule,
    method: str | Method,
    *,
    optimizer: Any = None,
    grad_scaler: Any = None,
    collective: Collective = "auto",
    exclude: str | Iterable[str] = (),
    min_numel: int | None = None,
    lanes: int | None = None,
    warmup_steps: int = 0,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
    check: bool = False,
    check_every: int = 0,
    fallback: Fallback | None = None,
    fallback_limit: float | None = None,
    backend: KernelBackend = "auto",
    transport: TransportName = "auto",
    **more: Unpack[RareOptions],
) -> Link:
    """Exchange the gradients of a module by a method from now on (collective call).

    For a module sharded by :func:`torch.distributed.fsdp.fully_shard`, the link replaces the all-reduce between the
    replicas of a shard if there are replicas: on a mesh of two dimensions, or with ``process_group``. Otherwise it
    replaces the reduce-scatter of the gradients. Collectives of parameters do not change. See ``docs/fsdp.md``.

    Args:
        module: A DistributedDataParallel module without a communication hook, or the root of a module sharded by
            ``fully_shard``.
        method: A method object or a spec such as ``"terngrad"`` or ``"TernGrad(clip=2.5)"``.
        optimizer: The optimizer of the parameters. Needed by methods that act on its steps, such as DIANA with a
            proximal operator, and by methods that use its learning rates, which are read when a round begins. With a
            method that has its own momentum (Signum, DGC, DIANA or error feedback with one), an optimizer with momentum
            raises IncompatibleError, here and before each step of any other. With a method whose residual may
            grow large (EF-signSGD and 1-bit SGD without small blocks), or in which gradients wait more than five rounds
            on average (error feedback around a hundredth of the elements, or around a tenth chosen at random), its
            momentum causes a warning that says what to do. With local steps its steps are counted; None: those of the
            first optimizer that holds one of the parameters. Of several, pass the one that steps last: what others step
            afterwards waits for the next exchange. Another one that shares parameters with it and steps twice without
            it, as in a later stage of a training, takes its place.
        grad_scaler: The scaler of automatic mixed precision. Methods that keep a residual or a momentum, or whose
            outcome is a direction, refuse gradients of a scaled loss without it. False: this module's gradients are not
            scaled, even if the program has a scaler.
        collective: ``"all_reduce"``, ``"all_gather"``, ``"two_shot"``, ``"tree"`` or ``"two_shot_merged"``, if the
            method can use it; or ``"auto"``: for each bucket the one that sends the fewest bytes, by exact count. If
            the outcome depends on the protocol, "auto" takes the method's usual one for all buckets instead, see
            :meth:`gradwire.Method.usual_collective`.
        exclude: Patterns of names of parameters that are sent in float32, such as ``"fc.*"`` for the last layer.
        min_numel: Parameters with fewer elements are sent in float32; None: 1024, but 0 for casts, SignSGD, Signum and
            DPSGD.
        lanes: Number of lanes: threads with connections of their own that exchange buckets in parallel; None: two. Over
            NCCL there is one.
        warmup_steps: Number of rounds at the start in which all parameters are sent in float32. A round is a backward
            pass that synchronises. Accumulate gradients under ``no_sync()`` for all but the last pass of a step:
            without it a step has several rounds, and methods whose outcome is a direction, or with a momentum of their
            own, raise IncompatibleError in the second.
        seed: Seed of all random streams; the same on all ranks.
        process_group: For DDP, the module's own group, which is the default. For a sharded module, the ranks that hold
            the same shard; their parameters must be equal when this is called.
        check: Verify after every bucket that all ranks hold the same bits.
        check_every: Number of rounds between two comparisons of the digests of all parameters over ranks; with local
            steps, number of exchanges between two comparisons of the global parameters; 0: never. A difference, for
            example after an optimizer step that one rank left out, is an error on all ranks when the next round begins.
            A comparison costs a CRC-32 of all parameters on each rank, and 8 bytes a parameter to every other rank. Not
            available for gossip, and not if a reduce-scatter leaves each rank its own shard.
        fallback: ``"bf16"`` or ``"fp32"``: the method that all ranks change to, in the same round and with a warning,
            once the relative error of any rank exceeds ``fallback_limit``. ``link.record()["fallback"]`` has the round
            and the reason.
        fallback_limit: Limit of the relative error: |sent - gradient| of a rank over all parameters, divided by the
            root mean square of |gradient| over ranks, measured in rounds 0, 10, 30 and every 100th. It grows with the
            residual of a biased method and with the variance of an unbiased one; ``link.diagnostics()`` shows usual
            values.
        backend: Backend of the kernels.
        transport: ``"gloo"`` for CPU tensors, ``"nccl"`` or ``"staged"`` (through page-locked memory, by Gloo) for CUDA
            tensors, or ``"auto"``; see ``docs/gpu.md``.
        more: Rarely used options: ``chunk_numel`` and ``link_cost`` (a :class:`gradwire.LinkCost`, for methods that use
            it), see :class:`gradwire.exchange.planning.Options`.

    Returns:
        The link: ``traffic()``, ``diagnostics()``, ``state_dict()``, ``record()``, ``error``.

    Raises:
        HyperparameterError: a spec, a field, an option or a pattern is wrong.
        IncompatibleError: the module's mode does not work with a hook; the message says what to change.
        RankMismatchError: ranks differ in version, method, options or parameters, or in the values of parameters.
        BackendError: a kernel backend is missing.
    """
    options: dict[str, Any] = dict(
        lanes=lanes,
        grad_scaler=grad_scaler,
        optimizer=optimizer,
        collective=collective,
        exclude=exclude,
        min_numel=min_numel,
        warmup_steps=warmup_steps,
        seed=seed,
        check=check,
        check_every=check_every,
        fallback=fallback,
        fallback_limit=fallback_limit,
        backend=backend,
        transport=transport,
        **more,
    )
    if isinstance(module, DistributedDataParallel):
        return attach_ddp(module, method, process_group, options)
    if _is_sharded(module):
        # Import only when needed: FSDP2 takes a second to import.
        from gradwire.link.adapters.fsdp import attach_fsdp

        return attach_fsdp(module, method, process_group, options)
    if hasattr(module, "_orig_mod"):
        raise IncompatibleError(
            "attach needs the module that was compiled, not what torch.compile returned: call gw.attach(ddp, method) "
            "before or after torch.compile(ddp)"
        )
    raise IncompatibleError(
        f"attach needs a DistributedDataParallel module, not {type(module).__name__}; wrap it first, shard it by "
        "torch.distributed.fsdp.fully_shard, or use gradwire.Link in a loop without DDP"
    )


def compress_weights(
    module: FSDPModule,
    method: str | Method = "QSGDinf(levels=7, block_size=128)",
    *,
    seed: int = 0,
    backend: KernelBackend = "auto",
) -> WeightLink:
    r"""Compress the all-gathers of a module sharded by ``fully_shard``: send changes of parameters (collective call).

    FSDP2 gathers every unit's parameters before forward and backward. From now on a rank sends the change of its shard
    w since the last gather. With C the operator and k the copy of the shard that all ranks hold, with the same bits::

        k <- w in the first gather        k <- k + C(w - k) where the shard of any rank has changed

    If no shard has changed, as in backward, only a flag is sent. Forward and backward compute with k; the optimizer
    updates w, which stays exact. The error of a gather is part of the next difference, so that k differs from w by the
    error of one step's difference; :meth:`WeightLink.drift` measures it. Losses may differ from those with exact
    weights.

    Args:
        module: The root of a module sharded by ``fully_shard``, with replicas or without.
        method: An operator on one vector, without a scale that ranks share: four bits a value by default.
        seed: Seed of random numbers; the same on all ranks.
        backend: Backend of the kernels.

    Returns:
        The link: ``drift()``, ``traffic()``, ``begin_anew()``, ``close()``. Call ``begin_anew()`` on all ranks after
        loading weights: the next gathers are then exact, as they are after a restart.

    Raises:
        HyperparameterError: the spec is wrong.
        IncompatibleError: the module or the method is not supported; the message says what to change.
        RankMismatchError: ranks differ in version, method, seed or units.

    Every rank then holds all parameters of the module in float32, the memory that sharding saves: use it for models
    that fit.

    Reference: J. Jia et al., "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism for LLM
    Training", NeurIPS 2024, section 3.1, where differences are those of the weights themselves and the operator rounds
    groups of values to the nearest of 16 levels.
    """
    if not _is_sharded(module):
        raise IncompatibleError(
            "compress_weights needs a module sharded by torch.distributed.fsdp.fully_shard, not "
            f"{type(module).__name__}: other modules gather no weights"
        )
    from gradwire.link.adapters.fsdp_weights import compress_sharded_weights

    return compress_sharded_weights(module, method, seed, backend)


def _is_sharded(module: object) -> TypeGuard[torch.nn.Module]:
    return isinstance(module, torch.nn.Module) and any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
