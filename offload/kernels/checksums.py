"""Combines the CRC-32C of adjacent parts into the CRC-32C of the whole."""

from __future__ import annotations

from functools import lru_cache

POLYNOMIAL = 0x82F63B78
"""Castagnoli's, bits reversed."""
Matrix = tuple[int, ...]
"""A matrix over bits: row i is the image of bit i of a checksum."""


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32C of two adjacent parts, from the CRC-32C of each; the second part has `second_bytes` bytes."""
    return _apply(_zeros(second_bytes), first) ^ second


@lru_cache(maxsize=1024)
def _zeros(nbytes: int) -> Matrix:
    """The matrix that advances a checksum over `nbytes` further zero bytes."""
    result: Matrix = tuple(1 << bit for bit in range(32))
    power = _one_byte()
    while nbytes:
        if nbytes & 1:
            result = _multiply(power, result)
        power, nbytes = _square(power), nbytes >> 1
    return result


@lru_cache(maxsize=1)
def _one_byte() -> Matrix:
    one_bit: Matrix = (POLYNOMIAL, *(1 << bit for bit in range(31)))
    return _square(_square(_square(one_bit)))


@lru_cache(maxsize=64)
def _square(matrix: Matrix) -> Matrix:
    return _multiply(matrix, matrix)


def _multiply(left: Matrix, right: Matrix) -> Matrix:
    return tuple(_apply(left, row) for row in right)


def _apply(matrix: Matrix, crc: int) -> int:
    total = 0
    for bit in range(32):
        if crc >> bit & 1:
            total ^= matrix[bit]
    return total
