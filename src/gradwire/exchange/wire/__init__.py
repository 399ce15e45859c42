"""Byte layout of a payload: a header, then sections, each a multiple of sixteen bytes long.

``docs/wire-format.md`` specifies it for other languages.
"""

from gradwire.exchange.wire.header import (
    EVERYONE,
    HEADER_BYTES,
    MOST_BODY_BYTES,
    WIRE_VERSION,
    Header,
    check_rows,
    pretend_senders,
    seal_rows,
)
from gradwire.exchange.wire.packing import Measured, OrAbsent, Packing, Whole, packing
from gradwire.exchange.wire.rows import ALIGNMENT, Rows, VariableRows, padded
from gradwire.exchange.wire.small_values import SUM_BYTES, checked_values, with_checksum

__all__ = [
    "ALIGNMENT",
    "EVERYONE",
    "HEADER_BYTES",
    "MOST_BODY_BYTES",
    "SUM_BYTES",
    "WIRE_VERSION",
    "Header",
    "Measured",
    "OrAbsent",
    "Packing",
    "Rows",
    "VariableRows",
    "Whole",
    "check_rows",
    "checked_values",
    "packing",
    "padded",
    "pretend_senders",
    "seal_rows",
    "with_checksum",
]
