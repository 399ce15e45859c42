# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies that colour lattice points and decode colours. ``loops.py`` calls them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from gradwire.kernels.lattice.operations import FAR
from gradwire.kernels.numba_core.philox import PhiloxVectors, five_words
from gradwire.kernels.numba_core.vectors import F32, I1, I16, I32, I64, Emitter, loop, vector, vector_body
from gradwire.kernels.table import GROUP_SIZE, LANES, PLANES

_AHEAD = 2560  # distance of prefetches, in elements
_FLAT = vector(I32, LANES)


def _scaled(e: Emitter, product: Any, place: Any, shift: Any, checked: bool = True) -> tuple[Any, Any]:
    """Return t and theta of sixteen elements; without ``checked``, all |t| must be below 2^23.

    ``place`` is ``u 2^8``, and ``shift`` the sender's shift times 2^8, less 2^31. Their wrapping sum is theta 2^32.
    """
    b = e.b
    theta = b.fmul(b.sitofp(b.add(place, shift), vector(F32, LANES)), e.constant(2.0**-32, F32))
    t = b.fsub(product, theta)
    if not checked:
        return t, theta
    near = b.fcmp_ordered("<", e.lanewise("fabs", t), e.constant(FAR, F32))
    return b.select(near, t, e.constant(0.0, F32)), theta


def _places(e: Emitter, words: list[Any]) -> list[Any]:
    """Return the uniform integers times 2^8 from the words that hold them in their upper bits."""
    return [e.b.and_(word, e.constant(0xFFFFFF00)) for word in words]


def _turned(e: Emitter, shift: Any) -> Any:
    """Return a shift in all lanes, in the form that ``_scaled`` takes."""
    b = e.b
    return e.splat(b.xor(b.shl(shift, ir.Constant(I32, 8)), ir.Constant(I32, 0x80000000)))


def _groups(b: Any, count: Any) -> Any:
    return b.sdiv(b.add(count, ir.Constant(I64, GROUP_SIZE - 1)), ir.Constant(I64, GROUP_SIZE))


def _odd(e: Emitter, word: Any) -> Any:
    """Return ``2 u + 1``."""
    return e.b.or_(e.shift_right(word, 7), e.constant(1))


@vector_body()
def lattice_colours(e, x, first, count, inverse, bits, shift, noise, digits, at, checks):
    """Write the colours of ``count`` elements from ``x[first]`` on, and add to the 16 lanes of their check."""
    b, values, target, checks = e.b, x.pointer(first, F32), digits.pointer(at, I16), checks.pointer(0, I32)
    inverse, narrow, shift = e.splat(inverse), b.trunc(bits, I32), _turned(e, shift)
    bits = e.splat(narrow)
    mask = e.splat(b.sub(b.shl(ir.Constant(I32, 1), narrow), ir.Constant(I32, 1)))
    source = PhiloxVectors(e, noise)

    def group(index: Any, products: list[Any]) -> list[Any]:
        begin = b.mul(index, ir.Constant(I64, GROUP_SIZE))
        here = e.at(values, begin, F32)
        masks = e.lanes_below(b.sub(count, begin), PLANES)
        words = five_words(e, source.words(list(products))[0])
        sums = e.load(checks, I32)
        for plane, (word, place, inside) in enumerate(zip(words, _places(e, words), masks)):
            pointer = e.at(here, LANES * plane, F32)
            e.prefetch(e.at(pointer, _AHEAD, F32))
            t, _ = _scaled(e, b.fmul(e.masked_load(pointer, F32, inside), inverse), place, shift)
            k = b.fptosi(e.lanewise("rint", t), _FLAT)
            to = e.at(target, b.add(begin, ir.Constant(I64, LANES * plane)), I16)
            e.store(b.trunc(b.and_(k, mask), vector(I16, LANES)), to, align=2)
            sums = b.add(sums, b.mul(b.ashr(k, bits), _odd(e, word)))
        e.store(sums, checks, align=4)
        return source.advance(list(products), 16)

    loop(b, _groups(b, count), 1, source.products(), group)


@vector_body()
def lattice_sums(e, own, x, first, count, side, colours, at, noise, checks, accumulate):
    """Sum the points of all rows nearest to ``own[first]`` on; the check of row r has 16 lanes, from ``16 * r`` on."""
    b, zero = e.b, ir.Constant(I64, 0)
    values, target, checks = own.pointer(first, F32), x.pointer(first, F32), checks.pointer(0, I32)
    shifts, digits, distance = colours.shifts.pointer(0, I32), colours.digits.pointer(at, F32), colours.distance
    number, inverse, scale, adds = (
        colours.shifts.length,
        e.splat(side.inverse),
        e.splat(side.scale),
        e.splat(accumulate),
    )
    narrow = b.trunc(colours.bits, I32)
    # Adding this number to d, |d| < 2^22 q, rounds d to a multiple of q, since the last bit of the sum is worth q. Ties
    # go to even multiples; the sum's bits count the multiples.
    magnet = e.splat(b.fmul(b.sitofp(b.shl(ir.Constant(I32, 1), narrow), F32), ir.Constant(F32, 1.5 * (1 << 23))))
    magnet_bits = b.bitcast(magnet, _FLAT)
    source = PhiloxVectors(e, noise)

    def some(first: Any, number_of_groups: Any, products: list[Any], whole: bool) -> list[Any]:
        """Sum ``number_of_groups`` groups from ``first`` on; unless ``whole``, the last one may be partial."""

        def group(index: Any, products: list[Any]) -> list[Any]:
            begin = b.mul(b.add(first, index), ir.Constant(I64, GROUP_SIZE))
            masks = [None] * PLANES if whole else e.lanes_below(b.sub(count, begin), PLANES)
            words = five_words(e, source.words(list(products))[0])
            places, odds = _places(e, words), [_odd(e, word) for word in words]
            scaled = []
            for plane, inside in enumerate(masks):
                at = e.at(values, b.add(begin, ir.Constant(I64, LANES * plane)), F32)
                e.prefetch(e.at(at, _AHEAD, F32))
                value = e.load(at, F32, align=4) if inside is None else e.masked_load(at, F32, inside)
                scaled.append(b.fmul(value, inverse))

            def summed(checked: bool) -> None:
                def row(index: Any, totals: list[Any]) -> list[Any]:
                    shift = _turned(e, b.load(e.at(shifts, index, I32)))
                    here = e.at(digits, b.add(b.mul(index, distance), begin), F32)
                    check = e.at(checks, b.mul(index, ir.Constant(I64, LANES)), I32)
                    new, sums = [], e.load(check, I32)
                    for plane, (product, place, odd) in enumerate(zip(scaled, places, odds)):
                        t, theta = _scaled(e, product, place, shift, checked)
                        colour = e.load(e.at(here, LANES * plane, F32), F32)
                        attracted = b.fadd(b.fsub(t, colour), magnet)
                        turn = b.sub(b.bitcast(attracted, _FLAT), magnet_bits)
                        sums = b.add(sums, b.mul(turn, odd))
                        # Below 2^24, so exact.
                        k = b.fadd(colour, b.fsub(attracted, magnet))
                        new.append(b.fadd(totals[plane], b.fmul(b.fadd(k, theta), scale)))
                    e.store(sums, check, align=4)
                    return new

                # Adding to minus zero changes no value, not even the sign of a zero.
                totals = loop(b, number, 1, [e.constant(-0.0, F32)] * PLANES, row)
                for plane, (total, inside) in enumerate(zip(totals, masks)):
                    to = e.at(target, b.add(begin, ir.Constant(I64, LANES * plane)), F32)
                    before = e.masked_load(to, F32, adds if inside is None else b.and_(inside, adds))
                    total = b.select(adds, b.fadd(before, total), total)
                    if inside is None:
                        e.store(total, to, align=4)
                    else:
                        e.masked_store(total, to, inside)

            near = e.constant(1, I1)
            for product in scaled:
                here = b.fcmp_ordered("<", e.lanewise("fabs", product), e.constant(FAR - 1, F32))
                near = b.and_(near, here)
            all_near = b.icmp_signed("==", e.mask_bits(near), ir.Constant(I64, (1 << LANES) - 1))
            with b.if_else(all_near) as (then, otherwise):
                with then:
                    summed(False)
                with otherwise:
                    summed(True)
            return source.advance(list(products), 16)

        return loop(b, number_of_groups, 1, products, group)

    whole = b.sdiv(count, ir.Constant(I64, GROUP_SIZE))
    products = some(zero, whole, source.products(), True)
    some(whole, b.sub(_groups(b, count), whole), products, False)
