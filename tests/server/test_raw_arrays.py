"""Arrays as bytes: only what was expected is decoded, and nothing is unpickled."""

import ast

import numpy as np
import pytest
import torch

from fedcover.server.raw_arrays import ArraySpec, InvalidReply, as_array, decode_array, safe_repr
from tests.helpers.replies import stored
from tests.helpers.repository import ROOT
from tests.helpers.worlds import same


def test_array_scattered_in_memory_is_refused():
    whole = stored(np.ones(3)).data
    twice = bytearray(2 * whole.nbytes)
    twice[::2] = whole
    with pytest.raises(InvalidReply, match=r"^damaged array: w is scattered in memory$"):
        decode_array(
            "w", stored(np.ones(3), data=memoryview(twice)[::2]), ArraySpec((3,), "float64")
        )


def test_sent_arrays_are_c_contiguous():
    """Whatever the order in memory."""
    turned = torch.arange(6.0).view(2, 3).T
    assert as_array(turned).flags.c_contiguous
    same(
        {"w": decode_array("w", stored(as_array(turned)), ArraySpec((3, 2), "float32"))},
        {"w": turned},
    )


def test_empty_array_is_decoded():
    assert decode_array("w", stored(np.ones((0, 4))), ArraySpec((0, 4), "float64")).shape == (0, 4)


SHOWN = [
    ("x" * 60, f"'{'x' * 50}'"),
    (b"\x80\n", r"b'\x80\n'"),
    ("\x1b[2Jé", r"'\x1b[2J\xe9'"),
    ("é" * 20, "'" + r"\xe9" * 19 + "..."),
    ((), "()"),
    ((3, "a", None), "(3, 'a', None)"),
    (tuple(range(8)), "(0, 1, 2, 3, 4, 5, 6, 7)"),
    (tuple(range(9)), "(0, 1, 2, 3, 4, 5, 6, 7, ...)"),
    (True, "True"),
    (0.5, "0.5"),
    (2**199 - 1, str(2**199 - 1)),
    (2**199, "a int"),
    ([1], "a list"),
    ((["x"], (1, "y" * 70)), f"(a list, (1, '{'y' * 50}'))"),
    (("x" * 30, "y" * 42), f"('{'x' * 30}', '{'y' * 42}')"),
    (("x" * 30, "y" * 43), f"('{'x' * 30}', '{'y' * 41}..."),
]


@pytest.mark.parametrize(("value", "text"), SHOWN)
def test_safe_repr_shows_at_most_eighty_characters(value, text):
    assert safe_repr(value) == text
    assert len(text) <= 80
    assert text.isascii()
    assert text.isprintable()


def test_pickle_is_used_for_own_child_processes_only():
    """The pipe between a run and the processes that it starts itself is neither the wire nor the
    disk.
    """
    root = ROOT / "src" / "fedcover"
    for path in root.rglob("*.py"):
        calls = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]
        for call in calls:
            name = ast.unparse(call.func)
            if name in ("np.load", "np.save", "numpy.load"):
                assert any(
                    k.arg == "allow_pickle" and ast.unparse(k.value) == "False"
                    for k in call.keywords
                ), path
            opens = name.split(".")[0] in (
                "pickle",
                "cloudpickle",
                "dill",
                "joblib",
                "shelve",
                "marshal",
            )
            assert path.name in ("launch.py", "worker.py") or not (
                opens or name in ("torch.load", "torch.save")
            ), (path, name)
