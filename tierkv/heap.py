"""The C library's heap: freed memory that it keeps from the system."""

import ctypes


def trim() -> None:
    """Give freed memory back to the system, where the C library can (glibc).

    It keeps what lies below anything still in use, and before 2.38 it hardly uses again what was
    aligned, as torch's memory is: many large tensors of many sizes let the heap grow without end.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
