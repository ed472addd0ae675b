"""Show the doctests of docstrings as code in the API reference."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class DoctestBlocks(griffe.Extension):
    """Put a fence around each paragraph that starts with `>>>`: Markdown takes it for a
    quotation.
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of one function, class or module."""
        if obj.docstring and "Example" not in obj.docstring.value:
            obj.docstring.value = DOCTEST.sub(_fenced, obj.docstring.value)


def _fenced(match: re.Match[str]) -> str:
    return f"```pycon\n{match[0]}\n```"
