"""Byte layout of a payload: a header, then sections, each a multiple of sixteen bytes long.

``docs/wire-format.md`` specifies it for other languages.
"""

from gradwire.exchange.wire.header import (
    EVERYONE,
    HEADER_BYTES,
    WIRE_VERSION,
    Header,
    check_rows,
    pretend_senders,
    seal_rows,
)
from gradwire.exchange.wire.packing import Measured, OrAbsent, Packing, Whole, packing
from gradwire.exchange.wire.rows import ALIGNMENT, Rows, VariableRows, padded
from gradwire.exchange.wire.sealed import SEAL_BYTES, open_sealed, sealed

__all__ = [
    "ALIGNMENT",
    "EVERYONE",
    "HEADER_BYTES",
    "SEAL_BYTES",
    "WIRE_VERSION",
    "Header",
    "Measured",
    "OrAbsent",
    "Packing",
    "Rows",
    "VariableRows",
    "Whole",
    "check_rows",
    "open_sealed",
    "packing",
    "padded",
    "pretend_senders",
    "seal_rows",
    "sealed",
]
