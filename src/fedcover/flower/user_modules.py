"""The user's own modules that an experiment names, so that they can travel inside its Flower App.

A module travels if it is in the current folder or beside the experiment's TOML file, and so do the files from these two
folders that it imports, directly or not. Whatever else it imports must be installed on every machine.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

from fedcover import registry
from fedcover.errors import InvalidValue
from fedcover.runs.experiment import Experiment

LARGEST = 8 * 2**20
"""Most bytes of source that travel: Flower's limit for an app is 10 MiB, when compressed."""
DEEPEST = 8
"""Most folders in one another: Flower's limit is 10, of which the app takes some."""
_LEFT_OUT = ("test_*.py", "*_test.py")
"""Files that Flower leaves out of every app."""
_NEVER = frozenset({"fedcover", "flwr"})


def modules_of(experiment: Experiment, folders: Sequence[Path]) -> dict[str, bytes]:
    """Return the files that an experiment's own functions need, by their paths below the folder they are found in.

    Args:
        experiment: Names functions as `package.module:function`.
        folders: Where modules may be taken from; Python must look for modules there, too.

    Raises:
        InvalidValue: If Flower would not carry a file, or there are too many bytes.
    """
    names = (
        registry.parse(field, str(getattr(experiment, field))).name
        for field in registry.POSITIONAL_ARGUMENTS
    )
    waiting = [name.partition(":")[0] for name in names if ":" in name]
    homes = _ModuleFinder(folders)
    files: dict[str, Path] = {}
    looked_at: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module in looked_at:
            continue
        looked_at.add(module)
        for path, file in homes.files_of(module):
            if path.as_posix() not in files:
                files[path.as_posix()] = _checked(path, file)
                waiting += imported_by(file.read_bytes(), _package_of(path))
    contents = {path: files[path].read_bytes() for path in sorted(files)}
    if (total := sum(map(len, contents.values()))) > LARGEST:
        raise InvalidValue(
            f"the modules that this experiment needs must be at most {LARGEST:,} bytes to travel with it; got "
            f"{total:,}: install them on every machine instead"
        )
    return contents


class _ModuleFinder:
    """Where top-level modules are, if they are in one of some folders."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = [folder.resolve() for folder in folders]

    def files_of(self, module: str) -> Iterator[tuple[Path, Path]]:
        """Every file that Python runs to import a module: below its folder, and on the disk."""
        first, *others = module.split(".")
        folder = self._folder_of(first)
        if folder is None:
            return
        path = Path(first)
        for name in [*others, ""]:
            for candidate in (path / "__init__.py", path.with_suffix(".py")):
                if (folder / candidate).is_file():
                    yield candidate, folder / candidate
                    break
            path = path / name

    def _folder_of(self, name: str) -> Path | None:
        """The folder that a top-level module comes from; None if Python finds it elsewhere, or not at all."""
        if name in _NEVER:
            return None
        try:
            found = find_spec(name)
        except (ImportError, ValueError):  # a module that was made by hand has no specification
            return None
        if found is None:
            return None
        places = (
            [found.origin] if found.has_location else list(found.submodule_search_locations or [])
        )
        here = {Path(place).resolve() for place in places if place}
        for folder in self._folders:
            if here & {folder / f"{name}.py", folder / name / "__init__.py", folder / name}:
                return folder
        return None


def imported_by(source: bytes, package: str) -> list[str]:
    """Return the modules that a file of a package imports, or might: `from a import b` may name a module or a function.

    >>> imported_by(b"import a.b\\nfrom c import d\\nfrom . import e\\nfrom ..f import g", "x.y")
    ['a.b', 'c', 'c.d', 'x.y', 'x.y.e', 'x.f', 'x.f.g']
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:  # whoever imports it is told
        return []
    modules: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and (origin := _origin(node, package)):
            modules += [
                origin,
                *(f"{origin}.{name.name}" for name in node.names if name.name != "*"),
            ]
    return modules


def _origin(node: ast.ImportFrom, package: str) -> str:
    """The module from which something is imported, in full."""
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def _package_of(path: Path) -> str:
    """The package that a file belongs to, against which it imports with dots."""
    return ".".join(path.parent.parts)


def _checked(path: Path, file: Path) -> Path:
    """The file, unless Flower would leave it out or refuse it."""
    for pattern in _LEFT_OUT:
        if fnmatch(path.name, pattern):
            raise InvalidValue(
                f"{file}: Flower leaves files named {pattern} out of every app, so this module cannot travel to the "
                "nodes: give it another name"
            )
    if len(path.parts) > DEEPEST:
        raise InvalidValue(
            f"{file}: a module that travels may be {DEEPEST - 1} folders deep; got {len(path.parts) - 1}"
        )
    return file
