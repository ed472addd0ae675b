"""What keeps long-lived programs of Flower at a level of memory."""

import os
import platform
import subprocess
import sys

import pytest

from fedcover.flower.memory import NO_CACHES


def test_a_long_lived_program_lets_no_garbage_lie():
    """What hangs in a cycle is gone soon, although Python itself would not look for it."""
    node = """
import gc, sys, time, types, weakref
from fedcover.flower import steady
class Held:
    pass
def node():
    held = Held()
    held.itself = held
    left = weakref.ref(held)
    del held
    while left() is not None:
        time.sleep(0.01)
gc.disable()
steady.PAUSE = 0.01
made_up = types.ModuleType("made_up")
made_up.node = node
sys.modules["made_up"] = made_up
steady.FLOWER_PROGRAMS["flower-supernode"] = "made_up:node"
sys.argv = ["steady", "flower-supernode"]
steady.main()
"""
    subprocess.run([sys.executable, "-c", node], check=True, timeout=120)


def test_without_flower_its_programs_cannot_be_run():
    hidden = (
        "import sys; sys.modules['flwr'] = None; from fedcover.flower import steady; steady.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", hidden, "flower-superlink"],
        capture_output=True,
        text=True,
        check=False,
    )
    told = "fedcover: this needs Flower; in a checkout of fedcover: pip install '.[flower]'\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_only_programs_of_flower_are_run_so():
    done = subprocess.run(
        [sys.executable, "-m", "fedcover.flower.steady", "ls"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    told, usage = done.stderr.splitlines()
    assert told == "fedcover: program must be one of flower-superlink, flower-supernode; got 'ls'"
    asked = [sys.executable, "-m", "fedcover.flower.steady", "--help"]
    assert subprocess.check_output(asked, text=True).splitlines() == [usage]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's")
@pytest.mark.parametrize(
    ("program", "before", "after"),
    [
        ("flower-supernode", "", "glibc.malloc.mmap_threshold=1048576"),
        (
            "flower-supernode",
            "glibc.malloc.mmap_threshold=4096",
            "glibc.malloc.mmap_threshold=4096",
        ),
        ("flower-superlink", "", NO_CACHES),
    ],
)
def test_what_a_supernode_starts_gives_large_pieces_pages_of_their_own(program, before, after):
    """Else the process of a message keeps up to three times the bytes that it has fetched."""
    script = f"""
import subprocess, sys, types
from fedcover.flower import steady
made_up = types.ModuleType("made_up")
tell = "import os; print(os.environ['GLIBC_TUNABLES'])"
made_up.show = lambda: subprocess.run([sys.executable, "-c", tell])
sys.modules["made_up"] = made_up
steady.FLOWER_PROGRAMS[{program!r}] = "made_up:show"
sys.argv = ["steady", {program!r}]
steady.main()
"""
    environment = {**os.environ, "GLIBC_TUNABLES": before}
    assert (
        subprocess.check_output([sys.executable, "-c", script], text=True, env=environment).strip()
        == after
    )


def without_and_with(call, script, environment=None):
    """What a script prints without a call, and with it."""
    return [
        subprocess.check_output(
            [sys.executable, "-c", script.replace("CALL", said)],
            timeout=120,
            env=environment,
            text=True,
        )
        for said in ("", call)
    ]


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc gives every thread its heap"
)
def test_one_heap_for_all_threads():
    """Threads that need memory at the same time take it from the same heap."""
    heaps = """
import ctypes, os, threading
from fedcover.flower.memory import share_one_heap
library = ctypes.CDLL(None)
library.fdopen.restype = ctypes.c_void_p
library.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
library.fflush.argtypes = [ctypes.c_void_p]
CALL
together = threading.Barrier(4)
def need():
    held = [bytes(2000) for _ in range(100)]
    together.wait()
threads = [threading.Thread(target=need) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
reading, writing = os.pipe()
file = library.fdopen(writing, b"w")
library.malloc_info(0, file)
library.fflush(file)
print(os.read(reading, 65536).count(b"<heap nr="))
"""
    alone, called = map(int, without_and_with("share_one_heap()", heaps))
    assert called == 1 < alone


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc raises its limit by itself"
)
def test_large_pieces_stay_out_of_the_heap():
    """However large a piece has been freed before, the next large one has pages of its own."""
    apart = """
import ctypes
from fedcover.flower.memory import HEAP_LIMIT, share_one_heap
CALL
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c apart d e used free f".split()]
library = ctypes.CDLL(None)
library.mallinfo2.restype = Info
bytes(2**22)
before = library.mallinfo2().apart
held = bytes(2**21)
print(library.mallinfo2().apart - before > HEAP_LIMIT)
"""
    assert without_and_with("share_one_heap()", apart) == ["False\n", "True\n"]


def test_names_that_were_looked_up_are_not_kept():
    """Python's cache of attributes keeps a name that was made for one lookup until another one takes its place."""
    names = """
import sys
from fedcover.flower.memory import release_memory
release_memory()
before = sys.getallocatedblocks()
names = ["name" + str(number) for number in range(4000)]
found = [hasattr(release_memory, name) for name in names]
del names, found
CALL
print(sys.getallocatedblocks() - before)
"""
    alone, tidied = map(int, without_and_with("release_memory()", names))
    assert tidied < 100 < 300 < alone


@pytest.mark.skipif(sys.platform != "linux", reason="sizes are read from /proc")
def test_a_peak_within_the_reserve_takes_no_pages():
    """Whatever sizes its pieces have, in whatever order they come and go, a peak has Python ask for no more."""
    peaks = """
import contextlib, random, re
from pathlib import Path
from fedcover.flower.memory import RESERVE, memory_reserve
def kib(name):
    return int(re.search(rf"{name}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
some = random.Random(0)
with contextlib.ExitStack() as stack:
    CALL
    asked, used = kib("VmData"), kib("RssAnon")
    for _ in range(3):
        peak = [bytes(some.randrange(100, 450)) for _ in range(RESERVE // 700)]
        some.shuffle(peak)
        del peak[::2], peak
    print(kib("VmData") - asked, kib("RssAnon") - used)
"""
    alone, kept = ([int(word) for word in told.split()] for told in without_and_with(
        "stack.enter_context(memory_reserve())", peaks))  # fmt: skip
    assert (
        kept[0] < 1000 < alone[0]
    )  # Python asks by the megabyte, the list itself by a tenth of that
    assert kept[1] < 300 < alone[1]


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc gives every thread a cache"
)
@pytest.mark.parametrize("given", [None, "glibc.malloc.check=0"])
def test_freed_memory_is_in_no_threads_cache(given):
    """What has been freed counts as free at once, in this program only, and the user's own settings stay."""
    freed = """
import ctypes, os
from fedcover.flower.memory import TUNABLES, disable_thread_caches
CALL
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c d e f used free g".split()]
library = ctypes.CDLL(None)
library.mallinfo2.restype = Info
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
for piece in [library.malloc(1000) for _ in range(7)]:
    library.free(piece)
before = library.mallinfo2().used
pieces = [library.malloc(1000) for _ in range(7)]
print(library.mallinfo2().used - before > 6000, os.environ.get(TUNABLES, ""))
"""
    environment = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    if given:
        environment["GLIBC_TUNABLES"] = given
    assert without_and_with("disable_thread_caches()", freed, environment) == [
        f"False {given or ''}\n",
        f"True {given or ''}\n",
    ]
    inherited = ":".join([*([given] if given else []), NO_CACHES])
    assert (
        without_and_with("disable_thread_caches(inherited=True)", freed, environment)[1]
        == f"True {inherited}\n"
    )
