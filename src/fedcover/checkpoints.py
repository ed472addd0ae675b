"""States on disk that survive anything: written beside, synced, renamed; each named after its own digest."""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedcover.errors import RunError
from fedcover.types import Coverage, Params, State

_NAME = re.compile(r"round-(\d{6})\.([0-9a-f]{16})\.safetensors")
KEPT = 2
"""Checkpoints that are kept: the newest, and one older in case the newest is damaged."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint file: the rounds done, and the digest that its content must have."""

    path: Path
    round: int
    digest: str


def write_atomically(path: Path, content: bytes) -> None:
    """Put a file in place all at once: a reader, or a crash, sees the old one or the new one, never half."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def save(folder: Path, state: State, experiment: str, *, keep: int | None = KEPT) -> Path:
    """Write a state; afterwards remove all but the `keep` newest."""
    content = safetensors.torch.save(_flat(state), metadata={"experiment": experiment, "round": str(state.round)})
    digest = hashlib.sha256(content).hexdigest()[:16]
    path = folder / f"round-{state.round:06d}.{digest}.safetensors"
    write_atomically(path, content)
    for old in found(folder)[keep:] if keep else []:
        old.path.unlink(missing_ok=True)
    return path


def found(folder: Path) -> list[Found]:
    """The checkpoints of a folder, newest first."""
    matches = [(path, _NAME.fullmatch(path.name)) for path in folder.glob("round-*.safetensors")]
    files = [Found(path, int(match[1]), match[2]) for path, match in matches if match]
    return sorted(files, key=lambda file: file.round, reverse=True)


def read(file: Found, experiment: str, device: torch.device | str) -> State:
    """The state in a checkpoint, refused if the file is damaged or belongs to another experiment."""
    try:
        digest = hashlib.sha256(file.path.read_bytes()).hexdigest()[:16]
        if digest != file.digest:
            raise RunError(f"checkpoint {file.path} is damaged: its digest is {digest}, not {file.digest}")
        with safe_open(file.path, framework="pt", device=str(device)) as opened:
            metadata = opened.metadata() or {}
            flat = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RunError(f"checkpoint {file.path} cannot be read: {error}") from error
    if metadata.get("experiment") != experiment:
        raise RunError(f"checkpoint {file.path} belongs to another experiment: {metadata.get('experiment')}")
    return _unflat(flat, file.round)


def newest(folder: Path, experiment: str, device: torch.device | str) -> tuple[State, list[str]]:
    """The newest state that is whole, and a sentence for each newer file that is not."""
    complaints: list[str] = []
    for file in found(folder):
        try:
            return read(file, experiment, device), complaints
        except RunError as error:
            complaints.append(str(error))
    raise RunError("; ".join(complaints) or f"there is no checkpoint in {folder}")


def _flat(state: State) -> dict[str, Tensor]:
    parts: list[tuple[str, Params]] = [("params", state.params), ("ever", state.coverage.ever)]
    parts += [(f"statistics/{key}", values) for key, values in state.statistics.items()]
    parts += [(f"window/{age:04d}", counts) for age, counts in enumerate(state.coverage.window)]
    return {f"{part}/{name}": t.contiguous().cpu() for part, values in parts for name, t in values.items()}


def _unflat(flat: dict[str, Tensor], round: int) -> State:
    def part(prefix: str) -> Params:
        return {name.removeprefix(prefix): t for name, t in flat.items() if name.startswith(prefix)}

    def keys(kind: str) -> Iterator[str]:
        yield from sorted({name.split("/")[1] for name in flat if name.startswith(f"{kind}/")})

    return State(
        round=round,
        params=part("params/"),
        statistics={key: part(f"statistics/{key}/") for key in keys("statistics")},
        coverage=Coverage(tuple(part(f"window/{age}/") for age in keys("window")), part("ever/")),
    )


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
