"""Examples in docstrings are run, but not those of modules that import Flower: it warns, and may
not be installed.
"""

import re
from pathlib import Path

FLOWER = Path(__file__).parent / "src" / "fedcover" / "flower"


def imports_flower(path: Path) -> bool:
    """Whether a module of that room imports Flower, itself or through its neighbours."""
    text = path.read_text()
    neighbours = re.findall(r"^from fedcover\.flower\.(\w+) import", text, re.MULTILINE)
    direct = re.search(r"^(from|import) flwr", text, re.MULTILINE) is not None
    return direct or any(imports_flower(FLOWER / f"{name}.py") for name in neighbours)


collect_ignore = [str(path) for path in FLOWER.glob("*.py") if imports_flower(path)]
