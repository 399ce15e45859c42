"""Static order-0 entropy coders of bytes: rANS and Huffman in checked sections, and the papers' Elias codes.

``docs/wire-format.md``, "Entropy-coded sections", states the formats. Codes follow the statistics of bytes, so a caller
saves bits by first joining small symbols in a byte: five trits (243 values) or two digits of up to 16 levels.
"""

from gradwire.kernels.entropy.base import CODERS, Coder, entropy_bits
from gradwire.kernels.entropy.elias import elias_bits, elias_decode, elias_encode
from gradwire.kernels.entropy.select import CODER_BACKENDS, get_coder

__all__ = [
    "CODERS",
    "CODER_BACKENDS",
    "Coder",
    "elias_bits",
    "elias_decode",
    "elias_encode",
    "entropy_bits",
    "get_coder",
]
