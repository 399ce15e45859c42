"""Options that several commands share, and records of options that a command takes as one parameter."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

METHOD_HELP = 'Method and its settings, such as terngrad or "TernGrad(clip=None)"; see: gradwire methods'
TRAINING, LINK, OUTPUT, RENDEZVOUS = "Training", "Gradient exchange", "Output", "torchrun"
MODEL, CLUSTER, MEMBERS = "Model", "Cluster", "Workers that come and go"

_training = partial(typer.Option, rich_help_panel=TRAINING)
_link = partial(typer.Option, rich_help_panel=LINK)
_output = partial(typer.Option, rich_help_panel=OUTPUT)
_cluster = partial(typer.Option, rich_help_panel=CLUSTER)
_method = partial(typer.Option, "--method", "-m", metavar="SPEC")


def _torchrun(name: str, text: str) -> Any:
    """Return an option of torchrun, under both of its spellings."""
    spellings = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
    return typer.Option(*spellings, help=text, rich_help_panel=RENDEZVOUS)


Method = Annotated[str, _method(help=METHOD_HELP)]
TaskMethod = Annotated[str | None, _method(help=METHOD_HELP, show_default="terngrad; for graph fp32")]
Methods = Annotated[list[str] | None, _method(help=f"{METHOD_HELP}. Repeatable")]
TaskName = Annotated[str, typer.Argument(metavar="TASK", help="digits, text, mnist, cifar10, logreg or graph")]
Lab = Annotated[
    str | None,
    typer.Option(metavar="SPEC", help="Emulated cluster (Linux, root), such as hosts=4,bandwidth=100mbit"),
]
Loopback = Annotated[bool, typer.Option("--loopback", help="No emulated cluster, no limits, no root")]
Delay = Annotated[str | None, _cluster(metavar="MS", help="One-way delay of the frames a host sends, such as 20ms")]
Jitter = Annotated[str | None, _cluster(metavar="MS", help="Each delay differs by up to this much, such as 2ms")]
Loss = Annotated[str | None, _cluster(metavar="PERCENT", help="Share of a host's frames that is lost, such as 0.1%")]
Burst = Annotated[
    str | None, _cluster(metavar="FRAMES", help="Frames lost in a row, on average; by default losses are independent")
]
Reorder = Annotated[str | None, _cluster(metavar="PERCENT", help="Share of frames not delayed, which overtake others")]
Outages = Annotated[
    list[str] | None,
    _cluster(
        "--outage",
        metavar="LENGTH@START[:hostN[-hostM]]",
        help="Links are silent: all, 10s@60s, one host's, 5s@90s:host2, or between two, 5s@90s:host2-host3; repeatable",
    ),
]
Congestion = Annotated[str | None, _cluster(metavar="NAME", help="TCP's congestion control; by default this machine's")]
Data = Annotated[str | None, _training(metavar="PATH", help="The data, in its original file format")]
Seed = Annotated[int, _training(help="Of weights, data order and the method's draws")]
Out = Annotated[Path | None, _output("--out", "-o", metavar="FOLDER", help="Run folder; by default one under runs/")]
Overwrite = Annotated[bool, _output(help="Replace a run folder that is there")]
LogEvery = Annotated[int, _output(help="Steps between rows of metrics")]
StopAfter = Annotated[int | None, _output(help="Stop after this step, to be resumed", min=1)]
Watch = Annotated[bool, typer.Option("--watch/--once", help="Go on until Ctrl-C, or do what there is to do now")]
Every = Annotated[float, typer.Option(metavar="SECONDS", help="Between two looks of --watch", min=0.01)]
AsJson = Annotated[bool, _output("--json", help="Print a list of flat JSON objects")]
Debug = Annotated[bool, _output(help="Show tracebacks and the workers' output")]


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of a training run besides those of its link: fields of ``RunConfig``, and settings of tasks.

    A setting of a task that is None keeps the task's default.
    """

    workers: Annotated[
        int, typer.Option("--workers", "-n", help="Number of workers; under torchrun, as many as it started")
    ] = 4
    simulate: Annotated[bool, typer.Option("--simulate", help="Play all workers in one process; same results")] = False
    lab: Lab = None
    data: Data = None
    steps: Annotated[int | None, _training(help="Optimizer steps")] = None
    batch: Annotated[int | None, _training(help="Samples a step, over all workers; logreg: 0 for all")] = None
    lr: Annotated[float | None, _training("--lr", help="Learning rate")] = None
    optimizer: Annotated[str | None, _training(help="sgd or adam")] = None
    momentum: Annotated[float | None, _training(help="Of sgd, 0 to below 1")] = None
    schedule: Annotated[str | None, _training(help="Of the learning rate: constant, polynomial or cosine")] = None
    weight_decay: Annotated[float | None, _training(help="Strength of the penalty in the loss; compressed with it")] = (
        None
    )
    seed: Seed = 0
    eval_every: Annotated[int | None, _training(help="Steps between evaluations")] = None
    ema: Annotated[
        float | None, _training(help="Evaluate a moving average of the weights with this decay, such as 0.9999")
    ] = None
    l2: Annotated[float | None, _training("--l2", help="logreg: strength of (l2/2) |x|^2")] = None
    l1: Annotated[float | None, _training("--l1", help="logreg: strength of l1 |x|_1; 0: off")] = None
    split: Annotated[str | None, _training(help="logreg: label (workers differ as much as they can) or random")] = None
    model: Annotated[
        str | None, _training(help="text: gru or transformer; cifar10: resnet8 or convnet; graph: gcn, gat or sage")
    ] = None
    crop: Annotated[int | None, _training(help="cifar10: height and width of crops, such as 24; 0: shifts")] = None
    graph: Annotated[str | None, _training("--graph", help="graph: digits, sbm or sbm100k")] = None
    layers: Annotated[int | None, _training(help="graph: number of graph layers")] = None
    partition: Annotated[str | None, _training("--partition", help="graph: random, greedy or contiguous")] = None
    halo: Annotated[
        str | None,
        _link(
            "--halo",
            metavar="SPEC",
            help='graph: how rows travel, such as bf16, "VARCO(start=128)", "CDFGNN(tolerance=0.1)" or isolated',
        ),
    ] = None
    threads: Annotated[int, _training(help="Torch threads of each worker")] = 1


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """Options of a link, under the names and with the defaults of ``LinkSettings``."""

    exclude: Annotated[
        list[str] | None, _link(metavar="PATTERN", help="Parameters that travel in float32; repeatable")
    ] = None
    min_numel: Annotated[
        int | None,
        _link(
            help="Smaller parameters travel in float32; by default 1024; 0 for casts, signsgd, signum, dpsgd and logreg"
        ),
    ] = None
    warmup_steps: Annotated[int, _link(help="Steps at the start in float32")] = 0
    collective: Annotated[str, _link(help="auto, all_reduce, all_gather, two_shot, tree or two_shot_merged")] = "auto"
    fallback: Annotated[
        str | None, _link(help="bf16 or fp32: return to it, on all workers, beyond --fallback-limit")
    ] = None
    fallback_limit: Annotated[
        float | None,
        _link(help="Relative error, such as 5.0, of what a worker sends; measured at steps 0, 10, 30 and every 100th"),
    ] = None
    check_every: Annotated[
        int | None,
        _link(
            help="Rounds between comparisons of all workers' parameters, by digests; 0: never. "
            "By default 100 in train and compare, 0 in run and for gossip"
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Return the options as fields of ``LinkSettings``."""
        return {**vars(self), "exclude": tuple(self.exclude or ())}


@dataclass(frozen=True, kw_only=True)
class TorchrunOptions:
    """Options that are handed to torchrun as the user wrote them; None: torchrun's default."""

    nproc_per_node: Annotated[str | None, _torchrun("nproc-per-node", "Workers on each machine")] = None
    nnodes: Annotated[str | None, _torchrun("nnodes", "Machines")] = None
    node_rank: Annotated[str | None, _torchrun("node-rank", "Rank of this machine")] = None
    master_addr: Annotated[str | None, _torchrun("master-addr", "Address of machine 0")] = None
    master_port: Annotated[str | None, _torchrun("master-port", "Port of machine 0")] = None
    rdzv_backend: Annotated[str | None, _torchrun("rdzv-backend", "Rendezvous, such as c10d")] = None
    rdzv_endpoint: Annotated[str | None, _torchrun("rdzv-endpoint", "HOST:PORT of the rendezvous")] = None
    rdzv_id: Annotated[str | None, _torchrun("rdzv-id", "Name of the job")] = None
    max_restarts: Annotated[str | None, _torchrun("max-restarts", "Largest number of restarts")] = None
    log_dir: Annotated[str | None, _torchrun("log-dir", "Folder for the workers' output")] = None

    def flags(self) -> dict[str, str | None]:
        """Return each flag's value under the flag's name."""
        return {name.replace("_", "-"): value for name, value in vars(self).items()}


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """Options by which a command takes part in a training whose workers come and go."""

    join: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Be one worker of a training whose workers come and go, kept by gradwire coordinate there",
            rich_help_panel=MEMBERS,
        ),
    ] = None
    secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The secret of that training; by default GRADWIRE_SECRET", rich_help_panel=MEMBERS
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of ``gradwire plan``."""

    profile: Annotated[
        str,
        typer.Option(
            "--profile", metavar="WHAT", help="A task, a model of bench step, or a .py script", rich_help_panel=MODEL
        ),
    ] = "digits"
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's, behind --")] = None
    data: Data = None
    method: Methods = None
    hosts: Annotated[list[int] | None, _cluster(help="Computers; repeatable")] = None
    gpus_per_host: Annotated[int, _cluster("--gpus-per-host", help="Workers on each, sharing its link")] = 1
    cores: Annotated[int | None, _cluster(help="Of each host, where workers compute on them; else none waits")] = None
    bandwidth: Annotated[list[str] | None, _cluster(help="Between hosts; repeatable")] = None
    delay: Annotated[str, _cluster("--delay", "--latency", help="Between hosts, one way; such as 20ms")] = "0ms"
    loss: Annotated[str, _cluster(help="Of packets between hosts, such as 0.1%")] = "0%"
    congestion: Congestion = None
    probe: Annotated[bool, _cluster("--probe", help="Under torchrun: measure the link of its group")] = False
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of collectives; else this machine's, made when first needed")
    ] = None
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Calibrate this machine anew")] = False
    calibration_limit: Annotated[
        float,
        typer.Option(
            "--calibration-limit", metavar="SECONDS", help="Calibrating may take so long; what is there by then is used"
        ),
    ] = 60.0
    figure: Annotated[Path | None, typer.Option(metavar="FILE", help="Throughput against workers, PNG or SVG")] = None
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of ``gradwire bench step``."""

    model: Annotated[list[str] | None, typer.Option(help="mlp, resnet, transformer, lenet; repeatable")] = None
    hosts: Annotated[list[int] | None, typer.Option(help="Emulated hosts; repeatable (2, 4, 8)")] = None
    bandwidth: Annotated[
        list[str] | None, typer.Option(help="Repeatable (50mbit, 100mbit, 1gbit, 5gbit, unlimited)")
    ] = None
    delay: Annotated[
        list[str] | None, _cluster(metavar="MS", help="One way, of what a host sends, such as 20ms; repeatable")
    ] = None
    loss: Annotated[
        list[str] | None, _cluster(metavar="PERCENT", help="Of the frames that a host sends, such as 0.1%; repeatable")
    ] = None
    jitter: Jitter = None
    burst: Burst = None
    reorder: Reorder = None
    outage: Outages = None
    congestion: Congestion = None
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="compute, 'ddp fp32', 'ddp fp16', 'ddp powersgd', 'gradwire SPEC'; on modules sharded by FSDP2 "
            "'fsdp SPEC', 'fsdp+weights SPEC' (gathers of weights compressed as well), 'hsdp SPEC' (two replicas), "
            "SPEC may be native; repeatable"
        ),
    ] = None
    lab: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="One cluster instead of the grid, such as hosts=4,bandwidth=100mbit"),
    ] = None
    loopback: Loopback = False
    compute: Annotated[
        str,
        typer.Option(
            metavar="real|sleep|cuda",
            help="sleep: workers sleep as long as one alone computes, so that only exchanges use the cores; "
            "cuda: they compute on this machine's GPUs",
        ),
    ] = "real"
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="For each exchange in each cell, about")] = 3.0
    cell_budget: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="For each cell, all its exchanges together, about; instead of --budget"),
    ] = None
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="JSON lines; what it holds is not measured again")
    ] = Path("step.jsonl")
    figure: Annotated[Path | None, typer.Option(metavar="FILE", help="Speed-ups against bandwidth, PNG or SVG")] = None
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class TimelineOptions:
    """Options of ``gradwire bench timeline``."""

    model: Annotated[str, typer.Option(help="mlp, resnet, transformer, lenet")] = "mlp"
    lab: Annotated[
        str, typer.Option(metavar="SPEC", help="The cluster; with --loopback its number of hosts alone counts")
    ] = "hosts=4,bandwidth=100mbit"
    loopback: Loopback = False
    method: Method = "terngrad"
    compute: Annotated[str, typer.Option(metavar="real|sleep", help="As for bench step")] = "sleep"
    steps: Annotated[int, typer.Option(help="To be recorded, after a few that are not")] = 3
    rank: Annotated[int, typer.Option(help="Whose last step the figure shows")] = 0
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE", help="All ranks' spans, for Perfetto or Chrome's tracing page"),
    ] = Path("timeline.json")
    figure: Annotated[Path | None, typer.Option(metavar="FILE", help="One rank's lanes, PNG or SVG")] = None
    as_json: AsJson = False


def with_records(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take records of options: a parameter annotated with one becomes an option for each field.

    The options stand in ``--help`` where the parameter stands in the signature, in the order of the fields.
    """
    records: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        found = [parameter]
        kind = parameter.annotation
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            records[parameter.name] = kind
            found = list(inspect.signature(kind, eval_str=True).parameters.values())
        parameters += [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in found]

    @functools.wraps(command)
    def expanded(**given: Any) -> None:
        built = {
            name: record(**{field.name: given.pop(field.name) for field in dataclasses.fields(record)})
            for name, record in records.items()
        }
        command(**given, **built)

    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def refuse_beside(
    context: typer.Context, option: str, allowed: set[str], why: str = "continues a run as it was begun"
) -> None:
    """Refuse options that the user gave beside one that decides all others.

    Args:
        context: Context of the command.
        option: The option that decides the others, as the user wrote it.
        allowed: Parameters of the command that may be given with it, including its own.
        why: What the option does, so that the others have no place beside it.

    Raises:
        UsageError: others were given; the message names them.
    """
    from gradwire.tools.experiments.errors import UsageError

    given = [
        parameter.opts[0] if parameter.param_type_name == "option" else str(context.params[parameter.name])
        for parameter in context.command.params
        if parameter.name is not None
        and parameter.name not in allowed
        and getattr(context.get_parameter_source(parameter.name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise UsageError(f"{option} {why}: leave {', '.join(given)} out")


def with_torchruns_workers(context: typer.Context, training: TrainingOptions) -> TrainingOptions:
    """Return the options with the number of workers that torchrun started, if it started this process as one of them.

    Raises:
        UsageError: the user gave another number, or torchrun's variable is none.
    """
    from gradwire.tools.experiments.errors import UsageError
    from gradwire.tools.experiments.run import under_torchrun
    from gradwire.tools.experiments.worker import ranks_started

    if training.simulate or training.lab is not None or not under_torchrun():
        return training
    started, source = ranks_started(), context.get_parameter_source("workers")
    if training.workers != started and getattr(source, "name", "") == "COMMANDLINE":
        raise UsageError(f"--workers {training.workers}, and torchrun has started {started}: leave --workers out")
    # The training itself says what to do if it is one.
    return training if started == 1 else dataclasses.replace(training, workers=started)


def check_figure(path: Path | None) -> None:
    """Refuse a figure that could not be written, before anything is computed.

    Raises:
        UsageError: the suffix is not .png or .svg, or the folder does not exist.
    """
    from gradwire.tools.experiments.errors import UsageError

    if path is None:
        return
    if path.suffix.lower() not in (".png", ".svg"):
        raise UsageError(f"--figure {path}: name a .png or .svg file")
    if not path.parent.is_dir():
        raise UsageError(f"--figure {path}: there is no folder {path.parent}")
