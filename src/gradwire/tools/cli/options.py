"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

METHOD_HELP = 'Method and its settings, such as terngrad or "TernGrad(clip=None)"; see: gradwire methods'
TRAINING, LINK, OUTPUT = "Training", "Gradient exchange", "Output"

TaskName = Annotated[str, typer.Argument(metavar="TASK", help="digits, text, mnist, cifar10, logreg or graph")]
Workers = Annotated[int, typer.Option("--workers", "-n", help="Number of workers")]
Simulate = Annotated[bool, typer.Option("--simulate", help="Play all workers in one process; same results")]
Lab = Annotated[
    str | None,
    typer.Option(metavar="SPEC", help="Emulated cluster (Linux, root), such as hosts=4,bandwidth=100mbit"),
]
Data = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="The data, in its original file format", rich_help_panel=TRAINING),
]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps", rich_help_panel=TRAINING)]
Batch = Annotated[
    int | None, typer.Option(help="Samples a step, over all workers; logreg: 0 for all", rich_help_panel=TRAINING)
]
LearningRate = Annotated[float | None, typer.Option("--lr", help="Learning rate", rich_help_panel=TRAINING)]
Momentum = Annotated[float | None, typer.Option(help="Of sgd, 0 to below 1", rich_help_panel=TRAINING)]
Optimizer = Annotated[str | None, typer.Option(help="sgd or adam", rich_help_panel=TRAINING)]
Seed = Annotated[int, typer.Option(help="Of weights, data order and the method's draws", rich_help_panel=TRAINING)]
EvalEvery = Annotated[int | None, typer.Option(help="Steps between evaluations", rich_help_panel=TRAINING)]
Ema = Annotated[
    float | None,
    typer.Option(
        help="Evaluate a moving average of the weights with this decay, such as 0.9999",
        rich_help_panel=TRAINING,
    ),
]
L2 = Annotated[float | None, typer.Option("--l2", help="logreg: strength of (l2/2) |x|^2", rich_help_panel=TRAINING)]
L1 = Annotated[
    float | None, typer.Option("--l1", help="logreg: strength of l1 |x|_1; 0: off", rich_help_panel=TRAINING)
]
Split = Annotated[
    str | None,
    typer.Option(help="logreg: label (workers differ as much as they can) or random", rich_help_panel=TRAINING),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="text: gru or transformer; cifar10: resnet8 or convnet; graph: gcn or gat", rich_help_panel=TRAINING
    ),
]
Crop = Annotated[
    int | None,
    typer.Option(help="cifar10: height and width of crops, such as 24; 0: shifts", rich_help_panel=TRAINING),
]
Schedule = Annotated[
    str | None,
    typer.Option(help="Of the learning rate: constant, polynomial or cosine", rich_help_panel=TRAINING),
]
WeightDecay = Annotated[
    float | None,
    typer.Option(help="Strength of the penalty in the loss; compressed with it", rich_help_panel=TRAINING),
]
GraphName = Annotated[str | None, typer.Option("--graph", help="graph: digits or sbm", rich_help_panel=TRAINING)]
Layers = Annotated[int | None, typer.Option(help="graph: number of graph layers", rich_help_panel=TRAINING)]
PartitionRule = Annotated[
    str | None,
    typer.Option("--partition", help="graph: random, greedy or contiguous", rich_help_panel=TRAINING),
]
Threads = Annotated[int, typer.Option(help="Torch threads of each worker", rich_help_panel=TRAINING)]
HaloSpec = Annotated[
    str | None,
    typer.Option(
        "--halo",
        metavar="SPEC",
        help='graph: how rows travel, such as bf16, "VARCO(start=128)", "CDFGNN(tolerance=0.1)" or isolated',
        rich_help_panel=LINK,
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Parameters that travel in float32; repeatable", rich_help_panel=LINK),
]
MinNumel = Annotated[
    int | None,
    typer.Option(help="Smaller parameters travel in float32; by default 1024, 0 for casts", rich_help_panel=LINK),
]
WarmupSteps = Annotated[int, typer.Option(help="Steps at the start in float32", rich_help_panel=LINK)]
Collective = Annotated[str, typer.Option(help="auto, all_reduce, all_gather or two_shot", rich_help_panel=LINK)]
Fallback = Annotated[
    str | None,
    typer.Option(help="bf16 or fp32: return to it, on all workers, beyond --fallback-limit", rich_help_panel=LINK),
]
FallbackLimit = Annotated[
    float | None,
    typer.Option(
        help="Relative error, such as 5.0, of what a worker sends; measured at steps 10, 30 and every 100",
        rich_help_panel=LINK,
    ),
]
CheckEvery = Annotated[
    int | None,
    typer.Option(
        help="Rounds between comparisons of all workers' parameters, by digests; 0: never. "
        "By default 100 in train and compare, 0 in run and for gossip",
        rich_help_panel=LINK,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", metavar="FOLDER", help="Run folder; by default one under runs/", rich_help_panel=OUTPUT
    ),
]
Overwrite = Annotated[bool, typer.Option(help="Replace a run folder that is there", rich_help_panel=OUTPUT)]
LogEvery = Annotated[int, typer.Option(help="Steps between rows of metrics", rich_help_panel=OUTPUT)]
AsJson = Annotated[bool, typer.Option("--json", help="Print a list of flat JSON objects", rich_help_panel=OUTPUT)]
Debug = Annotated[bool, typer.Option(help="Show tracebacks and the workers' output", rich_help_panel=OUTPUT)]


def refuse_beside(context: typer.Context, option: str, allowed: set[str]) -> None:
    """Refuse what the user gave beside an option that settles the rest.

    Args:
        context: Of the command.
        option: As the user wrote it.
        allowed: The command's parameters that may go with it, the option's own among them.

    Raises:
        UsageError: naming all that were given.
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
        raise UsageError(f"{option} continues a run as it was begun: leave {', '.join(given)} out")


def check_figure(path: Path | None) -> None:
    """Refuse a figure that could not be written, before anything is computed for it.

    Raises:
        UsageError: another suffix than PNG's or SVG's, or no such folder.
    """
    from gradwire.tools.experiments.errors import UsageError

    if path is None:
        return
    if path.suffix.lower() not in (".png", ".svg"):
        raise UsageError(f"--figure {path}: name a .png or .svg file")
    if not path.parent.is_dir():
        raise UsageError(f"--figure {path}: there is no folder {path.parent}")
