"""Asks the kernel for pages of 2 MiB under what a step reads from end to end: weights and KV cache on a CPU.

With pages of 4 KiB a core that streams weights looks up an address every 64 cache lines, and waits for it often. The
kernel decides; without such pages everything works as before, slower.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import sys
from collections.abc import Iterable

import torch

_PAGE = 2 << 20
# Of linux/mman.h, since Linux 6.1: at once, also what is written already. Python has no name for it yet.
_MADV_COLLAPSE = 25

logger = logging.getLogger(__name__)


def use_huge_pages(tensors: Iterable[torch.Tensor], *, are_written: bool) -> None:
    """For the memory under the tensors that lie on a CPU, and what else lies in its pages; contents stay.

    are_written: pages are there already, and are exchanged at once; else the memory gets these when it is written to.
    """
    if sys.platform != "linux":
        return
    pages = _pages_under(tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.nbytes)
    for advice in (mmap.MADV_HUGEPAGE, _MADV_COLLAPSE) if are_written else (mmap.MADV_HUGEPAGE,):
        _advise(pages, advice)


def _advise(pages: list[int], advice: int) -> None:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    num_given, reason = 0, 0
    # One by one: the kernel stops at the first it can not have, such as one that something else lies in too.
    for page in pages:
        if madvise(ctypes.c_void_p(page), ctypes.c_size_t(_PAGE), advice) == 0:
            num_given += 1
            continue
        reason = ctypes.get_errno()
        # Memory is in pieces: for each of the others the kernel would look for a whole one again, for a long time.
        if reason == errno.ENOMEM:
            break
    if reason:
        num_refused, why = len(pages) - num_given, os.strerror(reason)
        logger.debug("madvise %d not given for %d of %d huge pages: %s", advice, num_refused, len(pages), why)


def _pages_under(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Addresses of the huge pages that hold something of a tensor."""
    pages: set[int] = set()
    for tensor in tensors:
        begin = tensor.data_ptr()
        pages.update(range(begin // _PAGE * _PAGE, begin + tensor.nbytes, _PAGE))
    return sorted(pages)
