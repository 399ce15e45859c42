"""The communication hook of DistributedDataParallel. No mathematics here.

This module does not postpone annotations: DDP compares a hook's annotations with the types themselves.
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method
from gradwire.exchange.planning import refuse_scatter
from gradwire.link.checks import caution_about_unused
from gradwire.link.detached import DetachedLink
from gradwire.link.link import Link
from gradwire.link.parameters import check_steps_in_backward, plain_name


def attach_ddp(
    module: DistributedDataParallel, method: str | Method, process_group: dist.ProcessGroup | None, options: Any
) -> Link:
    """Exchange the gradients of a DDP module by a method from now on; see :func:`gradwire.attach`."""
    group = _check(module, process_group)
    refuse_scatter(options["collective"], "a DistributedDataParallel module")
    link = Link(_exchanged(module), method, group=group, **options)
    module._comm_hooks.clear()
    module.register_comm_hook(_Hooked(module, link), _exchange)
    if link.method.traits.local_steps:
        # DDP would send rank 0's buffers before every forward, and overwrite those that each rank has computed.
        module.broadcast_buffers = False
        link.local.count_any_optimizer()
        link.local.buffers = [b for b in _buffers(module) if b.is_floating_point()]
    _count_buffers(module, link)
    if module.find_unused_parameters:
        caution_about_unused(link.method, link._runtime.warnings)
    return link


def _reduced(module: DistributedDataParallel) -> set[int]:
    """Return the identities of the parameters that DDP reduces.

    Names do not tell: of the parameters that it was told to ignore, DDP still reduces those of the root module itself.
    """
    return {id(p) for p in module._build_params_for_reducer()[0]}


def _exchanged(module: DistributedDataParallel) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters that DDP reduces, and those that are frozen, by name."""
    reduced, ignored = _reduced(module), module.parameters_to_ignore
    named = module.module.named_parameters()
    return [(name, p) for name, p in named if id(p) in reduced or not (p.requires_grad or name in ignored)]


def _buffers(module: DistributedDataParallel) -> list[torch.Tensor]:
    """Return the buffers that DDP was not told to leave to each rank."""
    return [b for name, b in module.module.named_buffers() if name not in module.parameters_to_ignore]


class _Hooked:
    """The state that DDP passes to the hook: the link, and the names of all parameters and of those it exchanges."""

    def __init__(self, module: DistributedDataParallel, link: Link) -> None:
        self.link = link
        # Not kept alive: the module holds this object through C++, which the garbage collector does not see.
        self.module = weakref.ref(module)
        # DDP keeps the settings of a join that has ended.
        self.join_before = getattr(module, "_join_config", None)
        self.names = {id(p): plain_name(name) for name, p in module.module.named_parameters()}
        self.exchanged = set(link._parameters)

    def __reduce__(self) -> Any:
        return self.link.__reduce__()


def _exchange(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    handed: object = bucket
    if isinstance(handed, tuple):
        raise IncompatibleError(
            'torch.compile with optimize_ddp="python_reducer" calls hooks by parameter and ignores what they return; '
            'set torch._dynamo.config.optimize_ddp = "ddp_optimizer"'
        )
    if not isinstance(state, _Hooked):
        raise IncompatibleError("this module was reloaded without its link; call gradwire.attach on it again")
    flat = bucket.buffer()
    if flat.is_sparse:
        raise IncompatibleError("a sparse gradient cannot be exchanged; build the embedding with sparse=False")
    names = [state.names[id(p)] for p in bucket.parameters()]
    for name in names:
        if name not in state.exchanged:
            raise IncompatibleError(
                f"parameter {name!r} was frozen after the module was wrapped, so that DDP still reduces it, and before "
                "attach, so that the link does not: freeze parameters before DistributedDataParallel(module)"
            )
    if bucket.index() == 0:
        _heed_join(state)
    return state.link.exchange(bucket.index(), names, flat, bucket.is_last())


def _heed_join(state: _Hooked) -> None:
    """Refuse ``with module.join():`` beside local steps; on a rank that has joined, compare no parameters.

    Such a rank passes zeros outside a backward pass, and takes no steps: its parameters are the last rank's in the end.
    """
    config = getattr(state.module(), "_join_config", None)
    if config is None or not config.enable:
        return
    has_joined = torch._C._current_graph_task_id() == -1
    if state.link.method.traits.local_steps and (has_joined or config is not state.join_before):
        raise IncompatibleError(
            f"{state.link.method!r} counts the optimizer's steps, which a rank that has run out of data does not take: "
            "leave out module.join(), and give all ranks the same number of batches"
        )
    state.link._replicas.takes_part = not has_joined


def _check(module: DistributedDataParallel, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    reduced = _reduced(module)
    for name, p in module.module.named_parameters():
        if id(p) in reduced:
            check_steps_in_backward(name, p)
    hooks = [state for _, state in module._comm_hooks if not isinstance(state, DetachedLink)]
    if hooks:
        first = hooks[0]
        what, also = "another communication hook", ""
        if isinstance(first, _Hooked):
            what, also = repr(first.link.method), ", or leave gw.attach out of a script that gradwire run starts"
        raise IncompatibleError(
            f"this module already exchanges by {what}, and DDP takes one hook in its life; wrap the module anew{also}"
        )
    if module.mixed_precision is not None:
        raise IncompatibleError("DDP's mixed_precision takes the only hook; use torch.autocast instead")
    if getattr(module, "skip_all_reduce_unused_params", False):
        raise IncompatibleError(
            "with skip_all_reduce_unused_params=True DDP leaves out the hook for buckets that no rank uses, and a "
            "round would not begin or end; wrap the module without it"
        )
    if getattr(module, "_use_python_reducer", False):
        raise IncompatibleError(
            'optimize_ddp="python_reducer" ignores what a hook returns; set torch._dynamo.config.optimize_ddp = '
            '"ddp_optimizer" before wrapping'
        )
    for name, part in module.module.named_modules():
        is_sparse = getattr(part, "sparse", False) is True and isinstance(part, nn.Embedding | nn.EmbeddingBag)
        if is_sparse and id(part.weight) in reduced:
            raise IncompatibleError(
                f"module {name!r} makes sparse gradients, which no method here can exchange; build it with sparse=False"
            )
    if group is not None and group is not module.process_group:
        raise IncompatibleError("process_group differs from the module's own; wrap the module with that group instead")
    own: dist.ProcessGroup = module.process_group
    return own


class _BufferCounter:
    """Counts DDP's broadcasts of buffers: one from rank 0 to all before each synchronised forward.

    It is a forward pre-hook of the module, and is pickled with it.
    """

    def __init__(self, bytes_of_one: int) -> None:
        self.bytes_of_one, self.calls = bytes_of_one, 0

    def __call__(self, module: DistributedDataParallel, _inputs: object) -> None:
        self.calls += bool(module.broadcast_buffers and module.require_forward_param_sync)

    def total(self) -> int:
        return self.calls * self.bytes_of_one


def _count_buffers(module: DistributedDataParallel, link: Link) -> None:
    size = sum(b.numel() * b.element_size() for b in _buffers(module))
    if size and module.broadcast_buffers:
        counter = _BufferCounter(size * _broadcast_copies(link.rank, link.world_size))
        module.register_forward_pre_hook(counter)
        link.buffer_bytes = counter.total


def _broadcast_copies(rank: int, world_size: int) -> int:
    """Return how many copies a rank sends in a binomial tree from rank 0; all ranks together send N - 1."""
    reach = 1
    while reach <= rank:
        reach *= 2
    copies = 0
    while rank + reach < world_size:
        copies, reach = copies + 1, reach * 2
    return copies
