"""CRC-32 (that of zlib and gzip) of parts that follow each other; the standard library only."""

from __future__ import annotations

import functools

__all__ = ["combine"]

_POLYNOMIAL = 0xEDB88320


def combine(first: int, second: int, second_bytes: int) -> int:
    """The checksum of two runs of bytes, one behind the other, from their own."""
    if second_bytes == 0:
        return first
    return _multiply(_shift(second_bytes), first) ^ second


def _multiply(a: int, b: int) -> int:
    """a * b modulo the polynomial; the highest bit is the coefficient of x ** 0."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return product


@functools.lru_cache(maxsize=4096)
def _shift(num_bytes: int) -> int:
    """x ** (8 * num_bytes) modulo the polynomial."""
    result, power, rest = 1 << 31, 1 << 23, num_bytes  # 1 and x ** 8
    while rest:
        if rest & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        rest >>= 1
    return result
