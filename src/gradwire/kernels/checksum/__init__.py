"""The 64-bit checksum of payloads, as defined in docs/wire-format.md."""

from gradwire.kernels.checksum.operations import checksums, device_checksums, warm_up

__all__ = ["checksums", "device_checksums", "warm_up"]
