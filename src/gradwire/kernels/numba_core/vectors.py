# mypy: disable-error-code="no-untyped-call, no-untyped-def, no-any-return, misc, untyped-decorator"
"""Explicit vectors for Numba: a thin layer over llvmlite, used inside the bodies of ``@intrinsic`` functions.

LLVM vectorises straight loops over slices, but not what the kernels need: 64-bit products of every other lane, masked
loads, several planes at once. Only generic vector IR is emitted, so it runs on any CPU that LLVM supports; if registers
are narrower, LLVM splits the operations.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from llvmlite import ir
from llvmlite.binding import llvm_version_info
from numba.core import cgutils, types
from numba.extending import intrinsic

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()

_LITTLE = sys.byteorder == "little"
_COMPRESSING_LLVM = 19  # from this version on LLVM compresses vectors in registers

_NAMES = {str(I8): "i8", str(I16): "i16", str(I32): "i32", str(I64): "i64", str(F32): "f32"}


def vector(element: Any, lanes: int) -> Any:
    """Return the type of a vector."""
    return ir.VectorType(element, lanes)


def data_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, element: Any) -> Any:
    """Point to element ``index`` (counted in ``element``) of a Numba array's data."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(builder.bitcast(data, element.as_pointer()), [index])


class Operand:
    """An array that a compiled function passes to a vector body."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        self.dtype, self._place = kind.dtype, (context, builder, kind, value)

    def pointer(self, index: Any, element: Any) -> Any:
        """Point to element ``index`` (an i64 or an int, counted in ``element``) of the data."""
        index = ir.Constant(I64, index) if isinstance(index, int) else index
        return data_pointer(*self._place, index, element)

    @property
    def length(self) -> Any:
        """Return the number of elements (i64)."""
        context, builder, kind, value = self._place
        return context.make_array(kind)(context, builder, value).nitems


def _operand(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Wrap arrays and named tuples of them; scalars remain LLVM values, and other tuples become lists."""
    if isinstance(kind, types.Array):
        return Operand(context, builder, kind, value)
    if not isinstance(kind, types.BaseTuple):
        return value
    kinds: Any = kind
    parts = [_operand(context, builder, k, builder.extract_value(value, i)) for i, k in enumerate(kinds)]
    return SimpleNamespace(**dict(zip(kinds.fields, parts))) if isinstance(kind, types.BaseNamedTuple) else parts


def vector_body(returns: Any = types.void, *constants: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that turns a function that emits instructions into one for compiled code.

    The emitting function takes an :class:`Emitter` and the operands of the call: an :class:`Operand` for an array, an
    object with the fields for a named tuple, an LLVM value for a scalar. It returns nothing, a value, or a list of
    values where ``returns`` is a tuple.

    Args:
        returns: The type that the function returns in compiled code.
        constants: Names of parameters for which the emitting function gets the Numba *type* instead of the value.
    """

    def wrap(emit: Callable[..., Any]) -> Any:
        signature_of_emit = inspect.signature(emit)
        names = list(signature_of_emit.parameters)[1:]

        def define(typing_context, *kinds):
            def codegen(context, builder, signature, arguments):
                operands = [
                    kind if name in constants else _operand(context, builder, kind, value)
                    for name, kind, value in zip(names, signature.args, arguments)
                ]
                result = emit(Emitter(builder), *operands)
                if isinstance(result, list):
                    return context.make_tuple(builder, signature.return_type, result)
                return context.get_dummy_value() if result is None else result

            return returns(*kinds), codegen

        # Numba reads the names of parameters from this signature.
        define.__signature__ = signature_of_emit  # type: ignore[attr-defined]
        define.__name__, define.__doc__ = emit.__name__, emit.__doc__
        return intrinsic(define)

    return wrap


@intrinsic
def _prefer_wide(typing_context):
    """Let the calling function use 512-bit registers, also in functions inlined into it.

    LLVM prefers 256 bits on some CPUs, whose clock 512 bits slow down; these loops gain more than that costs.
    """

    def codegen(context, builder, signature, arguments):
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), codegen


prefer_wide: Any = _prefer_wide  # type checkers do not know that the decorator hides the first parameter


class Emitter:
    """Emits operations on vectors of ``lanes`` elements into a builder's current block."""

    def __init__(self, builder: Any, lanes: int = 16) -> None:
        self.b = builder
        self.lanes = lanes

    def constant(self, value: Any, element: Any = I32, lanes: int | None = None) -> Any:
        """Return a vector with one value in all lanes."""
        lanes = lanes or self.lanes
        return ir.Constant(vector(element, lanes), [value] * lanes)

    def constants(self, values: Sequence[Any], element: Any = I32) -> Any:
        """Return a vector of the given values."""
        return ir.Constant(vector(element, len(values)), list(values))

    def splat(self, scalar: Any, lanes: int | None = None) -> Any:
        """Copy a scalar to all lanes."""
        lanes = lanes or self.lanes
        undefined = ir.Constant(vector(scalar.type, lanes), ir.Undefined)
        one = self.b.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, undefined, ir.Constant(vector(I32, lanes), [0] * lanes))

    def shuffle(self, first: Any, second: Any, lanes: Sequence[int]) -> Any:
        """Pick lanes of the concatenation of two vectors."""
        return self.b.shuffle_vector(first, second, ir.Constant(vector(I32, len(lanes)), list(lanes)))

    def at(self, pointer: Any, index: Any, element: Any) -> Any:
        """Return a pointer ``index`` elements further."""
        index = ir.Constant(I64, index) if isinstance(index, int) else index
        return self.b.gep(self.b.bitcast(pointer, element.as_pointer()), [index])

    def load(self, pointer: Any, element: Any, lanes: int | None = None, align: int = 1) -> Any:
        """Load a vector."""
        kind = vector(element, lanes or self.lanes)
        return self.b.load(self.b.bitcast(pointer, kind.as_pointer()), align=align)

    def store(self, value: Any, pointer: Any, align: int = 1) -> None:
        """Store a vector."""
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=align)

    def stream(self, value: Any, pointer: Any) -> None:
        """Store a vector past the caches, to an address aligned to 64 bytes."""
        stored = self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=64)
        stored.set_metadata("nontemporal", self.b.module.add_metadata([ir.Constant(I32, 1)]))

    def call(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        """Call an LLVM intrinsic function by its full name."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), list(arguments))

    def lanewise(self, name: str, *operands: Any) -> Any:
        """Call an LLVM intrinsic whose operands and result have one vector type: fabs, smax, copysign, ..."""
        kind = operands[0].type
        return self.call(f"llvm.{name}.v{kind.count}{_NAMES[str(kind.element)]}", kind, operands)

    def reduce(self, name: str, operand: Any) -> Any:
        """Reduce the lanes of an integer vector by ``add``, ``smax``, ... to a scalar."""
        kind = operand.type
        return self.call(f"llvm.vector.reduce.{name}.v{kind.count}{_NAMES[str(kind.element)]}", kind.element, [operand])

    def first_lanes(self, count: Any) -> Any:
        """Return a mask of the first ``count`` lanes (an i64 of any sign)."""
        # Clamped to 32 bits, so that the comparison fits one register.
        low, high = ir.Constant(I64, 0), ir.Constant(I64, self.lanes)
        count = self.b.select(self.b.icmp_signed("<", count, low), low, count)
        count = self.b.select(self.b.icmp_signed("<", high, count), high, count)
        iota = self.constants(list(range(self.lanes)), I32)
        return self.b.icmp_signed("<", iota, self.splat(self.b.trunc(count, I32)))

    def lanes_below(self, count: Any, vectors: int) -> list[Any]:
        """Return masks of the first ``count`` lanes (a positive i64) of several vectors side by side."""
        most = ir.Constant(I64, vectors * self.lanes)
        count = self.b.select(self.b.icmp_signed("<", most, count), most, count)
        limit = self.splat(self.b.trunc(count, I32))
        starts = range(0, vectors * self.lanes, self.lanes)
        return [
            self.b.icmp_signed("<", self.constants(list(range(start, start + self.lanes))), limit) for start in starts
        ]

    def masked_load(self, pointer: Any, element: Any, mask: Any) -> Any:
        """Load the masked lanes, zero elsewhere; memory of the other lanes is not touched."""
        kind = vector(element, self.lanes)
        zero = self.constant(0.0 if element is F32 else 0, element)
        # Pointers have no element type in the names of LLVM 15 and later.
        name = f"llvm.masked.load.v{self.lanes}{_NAMES[str(element)]}.p0"
        pointer = self.b.bitcast(pointer, kind.as_pointer())
        return self.call(name, kind, [pointer, ir.Constant(I32, 1), mask, zero])

    def masked_store(self, value: Any, pointer: Any, mask: Any) -> None:
        """Store the masked lanes; memory of the other lanes is not touched."""
        kind = value.type
        name = f"llvm.masked.store.v{kind.count}{_NAMES[str(kind.element)]}.p0"
        pointer = self.b.bitcast(pointer, kind.as_pointer())
        self.call(name, ir.VoidType(), [value, pointer, ir.Constant(I32, 1), mask])

    def pick(self, pointer: Any, index: Any, element: Any) -> Any:
        """Load the elements at a vector of 32-bit indices, all of them within what ``pointer`` points to.

        There is one scalar load for each lane, which is never slower than a gather, and on some CPUs twice as fast.
        """
        return self.pick_all([(pointer, element)], index)[0]

    def pick_all(self, tables: Sequence[tuple[Any, Any]], index: Any) -> list[Any]:
        """Load the elements at a vector of 32-bit indices from several tables, each a pointer and a type."""
        b, lanes, one = self.b, index.type.count, ir.Constant(I64, 0xFFFFFFFF)
        pointers = [b.bitcast(pointer, element.as_pointer()) for pointer, element in tables]
        # Indices are extracted in pairs, which halves the moves between vector and scalar registers.
        pairs = b.bitcast(index, vector(I64, lanes // 2))
        picked = [self.constant(0, element, lanes) for _, element in tables]
        for pair in range(lanes // 2):
            both = b.extract_element(pairs, ir.Constant(I32, pair))
            halves = b.and_(both, one), b.lshr(both, ir.Constant(I64, 32))
            for lane, place in enumerate(halves if _LITTLE else halves[::-1], 2 * pair):
                for i, pointer in enumerate(pointers):
                    loaded = b.load(b.gep(pointer, [place]))
                    picked[i] = b.insert_element(picked[i], loaded, ir.Constant(I32, lane))
        return picked

    def permute(self, table: Any, index: Any) -> Any:
        """Pick lanes of a vector of eight by a vector of 32-bit indices, all of them below eight.

        For a table of eight, LLVM turns this pattern into one instruction of AVX2 or AVX-512; without them it goes
        through memory.
        """
        b = self.b
        picked = ir.Constant(vector(table.type.element, index.type.count), ir.Undefined)
        for lane in range(index.type.count):
            value = b.extract_element(table, b.extract_element(index, ir.Constant(I32, lane)))
            picked = b.insert_element(picked, value, ir.Constant(I32, lane))
        return picked

    def expand_load(self, pointer: Any, element: Any, mask: Any) -> Any:
        """Load neighbouring elements into the masked lanes, zero elsewhere; no other memory is touched."""
        count = mask.type.count
        name = f"llvm.masked.expandload.v{count}{_NAMES[str(element)]}"
        return self.call(name, vector(element, count), [pointer, mask, self.constant(0, element, count)])

    def compress_store(self, value: Any, pointer: Any, mask: Any, element: Any = I16) -> None:
        """Store the masked 32-bit lanes, or their low bits, side by side; the rest of 16 elements is overwritten."""
        count = value.type.count
        narrow = vector(element, count)
        if llvm_version_info[0] >= _COMPRESSING_LLVM:
            # Compressed in a register first: compressing to memory is many times slower on some CPUs.
            name = f"llvm.experimental.vector.compress.v{count}i32"
            packed = self.call(name, value.type, [value, mask, ir.Constant(value.type, ir.Undefined)])
            self.store(packed if element is I32 else self.b.trunc(packed, narrow), pointer)
        else:
            arguments = [value if element is I32 else self.b.trunc(value, narrow), pointer, mask]
            self.call(f"llvm.masked.compressstore.v{count}{_NAMES[str(element)]}", ir.VoidType(), arguments)

    def mask_bits(self, mask: Any) -> Any:
        """Return the lanes of a mask as the bits of an i64."""
        bits = self.b.bitcast(mask, ir.IntType(mask.type.count))
        return bits if mask.type.count == 64 else self.b.zext(bits, I64)

    def count(self, mask: Any) -> Any:
        """Count the lanes of a mask (i64)."""
        return self.call("llvm.ctpop.i64", I64, [self.mask_bits(mask)])

    def prefetch(self, pointer: Any, first: bool = True) -> None:
        """Prefetch the cache line of any address into all caches; unless ``first``, into all but the first."""
        pointer, nearness = self.b.bitcast(pointer, I8.as_pointer()), 3 if first else 2
        self.call("llvm.prefetch.p0", ir.VoidType(), [pointer, *(ir.Constant(I32, v) for v in (0, nearness, 1))])

    def is_aligned(self, pointer: Any) -> Any:
        """Return whether an address is a multiple of 64 bytes."""
        rest = self.b.and_(self.b.ptrtoint(pointer, I64), ir.Constant(I64, 63))
        return self.b.icmp_signed("==", rest, ir.Constant(I64, 0))

    def shift_left(self, value: Any, bits: int) -> Any:
        """Shift every lane by a constant."""
        return self.b.shl(value, self.constant(bits, value.type.element, value.type.count))

    def shift_right(self, value: Any, bits: int) -> Any:
        """Shift every lane by a constant, zeros in."""
        return self.b.lshr(value, self.constant(bits, value.type.element, value.type.count))

    def high_product(self, value: Any, factor: Any) -> Any:
        """Multiply 16-bit lanes and keep the upper 16 bits; one instruction on x86."""
        wide = vector(I32, value.type.count)
        product = self.b.mul(self.b.zext(value, wide), self.b.zext(factor, wide))
        return self.b.trunc(self.b.lshr(product, self.constant(16, I32, value.type.count)), value.type)


def loop(
    builder: Any,
    stop: Any,
    step: int,
    carried: Sequence[Any],
    body: Callable[[Any, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Emit ``for i in range(0, stop, step)`` (i64) with values carried from turn to turn; return the last values."""
    before = builder.block
    head, inner, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(ir.Constant(I64, 0), before)
    values = []
    for value in carried:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        values.append(phi)
    builder.cbranch(builder.icmp_signed("<", index, stop), inner, after)
    builder.position_at_end(inner)
    new = body(index, values)
    index.add_incoming(builder.add(index, ir.Constant(I64, step)), builder.block)
    for phi, value in zip(values, new):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


@vector_body(types.float64)
def power_of_two(e, exponent):
    """Return ``2^exponent``, a normal number."""
    b = e.b
    return b.bitcast(b.shl(b.add(exponent, ir.Constant(I64, 1023)), ir.Constant(I64, 52)), F64)


@vector_body(types.int64)
def trailing_zeros(e, word):
    """Count the zeros below the lowest 1 of a word (64 bits), which must not be zero."""
    return e.b.cttz(word, ir.Constant(I1, 1))
