"""The user's own modules that an experiment names, so that they can travel in its Flower App.

A module travels if it is in the current folder or in that of the experiment's TOML file. So do
the files from these folders that it imports, directly or not. All else that it imports must be
installed on every machine.
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
"""The most bytes of source that travel: Flower's limit for an app is 10 MiB, compressed."""
DEEPEST = 8
"""The most nested folders: Flower's limit is 10, of which the app takes some."""
_IGNORED_PATTERNS = ("test_*.py", "*_test.py")
"""Files that Flower leaves out of every app."""
_INSTALLED = frozenset({"fedcover", "flwr"})


def modules_of(experiment: Experiment, folders: Sequence[Path]) -> dict[str, bytes]:
    """Return the files that an experiment's own functions need, by path below their folder.

    Args:
        experiment: Names functions as `package.module:function`.
        folders: Where modules may be taken from; Python must search them, too.

    Raises:
        InvalidValue: If Flower would not carry a file, or there are too many bytes.
    """
    finder = _ModuleFinder(folders)
    modules_to_visit = _named_modules(experiment)
    visited: set[str] = set()
    files: dict[str, Path] = {}
    while modules_to_visit:
        module = modules_to_visit.pop()
        if module in visited:
            continue
        visited.add(module)
        for path, file in finder.files_of(module):
            if path.as_posix() not in files:
                _check_can_travel(path, file)
                files[path.as_posix()] = file
                modules_to_visit += imported_by(file.read_bytes(), _package_of(path))
    contents = {path: files[path].read_bytes() for path in sorted(files)}
    num_bytes = sum(map(len, contents.values()))
    if num_bytes > LARGEST:
        raise InvalidValue(
            f"the modules that this experiment needs must be at most {LARGEST:,} bytes to travel "
            f"with it; got {num_bytes:,}: install them on every machine instead"
        )
    return contents


def _named_modules(experiment: Experiment) -> list[str]:
    """Return the modules of the functions that an experiment names."""
    modules = []
    for field in registry.POSITIONAL_ARGUMENTS:
        name = registry.parse(field, str(getattr(experiment, field))).name
        module, colon, _ = name.partition(":")
        if colon:
            modules.append(module)
    return modules


class _ModuleFinder:
    """Finds modules that are in one of some folders."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = [folder.resolve() for folder in folders]

    def files_of(self, module: str) -> Iterator[tuple[Path, Path]]:
        """Yield every file that an import of a module runs: its relative and its full path."""
        top_level, *submodules = module.split(".")
        folder = self._folder_of(top_level)
        if folder is None:
            return
        path = Path(top_level)
        for submodule in [*submodules, ""]:
            for candidate in (path / "__init__.py", path.with_suffix(".py")):
                if (folder / candidate).is_file():
                    yield candidate, folder / candidate
                    break
            path = path / submodule

    def _folder_of(self, name: str) -> Path | None:
        """Return the folder of a top-level module, or None if Python finds it elsewhere."""
        if name in _INSTALLED:
            return None
        try:
            spec = find_spec(name)
        except (ImportError, ValueError):  # a module made by hand has no specification
            return None
        if spec is None:
            return None
        if spec.has_location:
            origins = [spec.origin]
        else:
            origins = list(spec.submodule_search_locations or [])
        locations = {Path(origin).resolve() for origin in origins if origin}
        for folder in self._folders:
            if locations & {folder / f"{name}.py", folder / name / "__init__.py", folder / name}:
                return folder
        return None


def imported_by(source: bytes, package: str) -> list[str]:
    """Return the modules that a file of a package imports, or might import.

    In `from a import b`, `b` may be a module or a function.

    >>> imported_by(b"import a.b\\nfrom c import d\\nfrom . import e\\nfrom ..f import g", "x.y")
    ['a.b', 'c', 'c.d', 'x.y', 'x.y.e', 'x.f', 'x.f.g']
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:  # Python reports it when the file is imported
        return []
    modules: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = _imported_module(node, package)
            if origin:
                names = [alias.name for alias in node.names if alias.name != "*"]
                modules += [origin, *(f"{origin}.{name}" for name in names)]
    return modules


def _imported_module(node: ast.ImportFrom, package: str) -> str:
    """Return the full name of the module that something is imported from."""
    parts: list[str] = []
    if node.level:
        parts = package.split(".")
        parts = parts[: len(parts) - node.level + 1]
    if node.module:
        parts = [*parts, node.module]
    return ".".join(parts)


def _package_of(path: Path) -> str:
    """Return the package of a file, to which its relative imports refer."""
    return ".".join(path.parent.parts)


def _check_can_travel(path: Path, file: Path) -> None:
    """Check that Flower will neither leave a file out nor reject it."""
    for pattern in _IGNORED_PATTERNS:
        if fnmatch(path.name, pattern):
            raise InvalidValue(
                f"{file}: Flower leaves files named {pattern} out of every app, "
                "so this module cannot travel to the nodes: give it another name"
            )
    if len(path.parts) > DEEPEST:
        raise InvalidValue(
            f"{file}: a module that travels may be {DEEPEST - 1} folders deep; "
            f"got {len(path.parts) - 1}"
        )
