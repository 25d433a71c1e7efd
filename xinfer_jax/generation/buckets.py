"""Sizes of arrays, rounded up so that few programs are compiled."""

_MIN_BUCKET = 16


def bucket(size: int) -> int:
    """The smallest power of two that is at least `size`, and at least 16: for lengths."""
    return max(_MIN_BUCKET, next_power_of_two(size))


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`: for numbers of rows."""
    return 1 << (size - 1).bit_length()
