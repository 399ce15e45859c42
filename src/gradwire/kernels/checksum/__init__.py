"""The 64-bit checksum of payloads, as defined in docs/wire-format.md."""

from gradwire.kernels.checksum.device import device_checksums
from gradwire.kernels.checksum.front import checksums, warm_up

__all__ = ["checksums", "device_checksums", "warm_up"]
