"""The 64-bit checksum of payloads and coded sections, which docs/wire-format.md defines."""

from gradwire.kernels.checksum.operations import checksums, device_checksums, warm_up

__all__ = ["checksums", "device_checksums", "warm_up"]
