"""Probe the network of a group, and print the delay that was found: ``python probed_link.py`` on each host of a lab."""

from __future__ import annotations

import torch.distributed as dist

import gradwire as gw

dist.init_process_group("gloo")
link = gw.probe()
if dist.get_rank() == 0:
    print("delay", link.latency_s)
dist.destroy_process_group()
