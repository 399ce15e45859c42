"""Integrations with other libraries, each of which is imported only when it is used."""

from gradwire.integrations.attachment import Attachment
from gradwire.integrations.distributed_checkpoint import StatefulLink
from gradwire.integrations.hugging_face import accelerate, trainer
from gradwire.integrations.lightning_strategies import fabric, lightning
from gradwire.integrations.sinks import MLflowSink, PrometheusSink, Sink, TensorBoardSink, WandbSink

__all__ = [
    "Attachment",
    "MLflowSink",
    "PrometheusSink",
    "Sink",
    "StatefulLink",
    "TensorBoardSink",
    "WandbSink",
    "accelerate",
    "fabric",
    "lightning",
    "trainer",
]
