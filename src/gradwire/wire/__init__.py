"""Byte layout of a payload: a header, then sections, each a multiple of sixteen bytes long.

Another language can read it from ``docs/wire-format.md``.
"""

from gradwire.wire.coded import CodedRows
from gradwire.wire.header import HEADER_BYTES, WIRE_VERSION, Header, check_rows
from gradwire.wire.rows import ALIGNMENT, Rows, padded

__all__ = ["ALIGNMENT", "HEADER_BYTES", "WIRE_VERSION", "CodedRows", "Header", "Rows", "check_rows", "padded"]
