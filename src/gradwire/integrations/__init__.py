"""What joins gradwire with other libraries, each of which is imported only when it is asked for."""

from gradwire.integrations.mlflow import MLflowSink
from gradwire.integrations.prometheus import PrometheusSink
from gradwire.integrations.sink import Sink
from gradwire.integrations.tensorboard import TensorBoardSink
from gradwire.integrations.wandb import WandbSink

__all__ = ["MLflowSink", "PrometheusSink", "Sink", "TensorBoardSink", "WandbSink"]
