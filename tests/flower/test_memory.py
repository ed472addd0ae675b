"""Memory that goes back to the system."""

import gc
import os
import platform
import subprocess
import sys
import weakref

import pytest

from fedcover.flower.memory import map_large_tensors_in_children, release_memory

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's")


class Node:
    """Something that can be part of a cycle."""


def test_garbage_in_a_cycle_is_released():
    gc.disable()
    try:
        node = Node()
        node.itself = node
        reference = weakref.ref(node)
        del node
        assert reference() is not None
        release_memory()
        assert reference() is None
    finally:
        gc.enable()


RESIDENT_AFTER_RELEASE = """
import re
from pathlib import Path
from fedcover.flower.memory import release_memory
def resident_kib():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
start = resident_kib()
pieces = [bytearray(10_000) for _ in range(5000)]
last = bytearray(10_000)  # it lies behind the pieces, so the heap cannot shrink to them
del pieces
before = resident_kib()
CALL
print(before - start, resident_kib() - start)
"""


@needs_glibc
def test_free_pages_go_back_to_the_system():
    outputs = [
        subprocess.check_output(
            [sys.executable, "-c", RESIDENT_AFTER_RELEASE.replace("CALL", call)], text=True
        )
        for call in ("pass", "release_memory()")
    ]
    (_, retained), (before, after) = (map(int, output.split()) for output in outputs)
    assert retained > 40_000
    assert before > 40_000 > 10_000 > after


@needs_glibc
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "glibc.malloc.mmap_threshold=1048576"),
        ("glibc.malloc.check=0", "glibc.malloc.check=0:glibc.malloc.mmap_threshold=1048576"),
        ("glibc.malloc.mmap_threshold=4096", "glibc.malloc.mmap_threshold=4096"),
    ],
)
def test_children_map_large_tensors_unless_the_user_has_set_a_limit(monkeypatch, before, after):
    monkeypatch.setenv("GLIBC_TUNABLES", before)
    map_large_tensors_in_children()
    assert os.environ["GLIBC_TUNABLES"] == after


IS_MAPPED = """
import ctypes, os
class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
library = ctypes.CDLL(None)
library.mallinfo2.restype = Info
bytearray(2**24)  # freed, which raises glibc's own limit
before = library.mallinfo2().hblkhd
tensor = bytearray(2**22)
print(library.mallinfo2().hblkhd - before >= 2**22)
"""


@needs_glibc
@pytest.mark.parametrize("is_set", [False, True])
def test_large_tensor_has_pages_of_its_own_in_a_child(monkeypatch, is_set):
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    if is_set:
        map_large_tensors_in_children()
    output = subprocess.check_output([sys.executable, "-c", IS_MAPPED], text=True)
    assert output == f"{is_set}\n"
