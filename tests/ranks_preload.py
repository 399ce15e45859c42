"""What the server that forks ranks has loaded before it forks: libraries and compiled kernels, once instead of by rank.

Loading them takes a rank about five seconds of CPU, three of them ``torch._dynamo``, which DDP imports when it is first
used. The server starts no thread, so that a fork is safe.
"""

import triton_first

# isort: split
import gc

import sklearn.datasets  # noqa: F401
import torch
import torch._dynamo
import torch.distributed
from torch.nn.parallel import DistributedDataParallel  # noqa: F401

import gradwire.interface  # noqa: F401
from gradwire.kernels import CODERS, FAMILIES, checksum, get_kernels

torch.set_num_threads(1)
# As in the tests' own process: the first test that asks for the backend in a rank would settle for all later ones that
# the kernels are compiled.
triton_first.import_kernels()
get_kernels().warm_up((*FAMILIES, *CODERS))
checksum.warm_up()
# What is loaded stays: no collection in a rank goes through it again, nor does a search for living objects, and pages
# that the collector does not write are shared with the server.
gc.collect()
gc.freeze()
