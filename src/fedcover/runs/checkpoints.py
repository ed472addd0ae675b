"""States on disk that survive anything: written beside, synced, renamed; each named after its own digest."""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedcover.errors import RunError
from fedcover.host.disk import check_not_linked, read_bytes, reason, write_atomically
from fedcover.tensors import FlatParams, flatten, named_shapes
from fedcover.types import Coverage, Params, State

_NAME = re.compile(r"round-(\d{6,})\.([0-9a-f]{16})\.safetensors")
_BESIDE = re.compile(r"\.(.+\.(?:safetensors|json|jsonl|toml))\.\d+")
_KINDS = ("statistics", "measured", "server", "private")
_KEYED = tuple(f"{kind}/" for kind in ("window", *_KINDS))
_WINDOW = re.compile(r"window/\d+")
KEPT = 2
"""Checkpoints that are kept: the newest, and one older in case the newest is damaged."""


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A checkpoint file: the rounds done, and the digest that its content must have."""

    path: Path
    round: int
    digest: str

    def line(self) -> dict[str, Any] | None:
        """The line of figures that was written with the state, if any was."""
        line = _about(read_bytes(self.path)).get("line")
        return line if isinstance(line, dict) else None


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left half written; only for the one process that may write there."""
    for beside in folder.glob(".*.*"):
        if _BESIDE.fullmatch(beside.name):
            beside.unlink(missing_ok=True)


def save_checkpoint(
    folder: Path,
    state: State,
    experiment: str,
    *,
    keep: int | None = KEPT,
    line: dict[str, Any] | None = None,
) -> Path:
    """Write a state, and a line of figures if one is to be as safe; afterwards remove all but the `keep` newest."""
    named = _flat(state)
    # the format sorts tensors, but sums over all of them must keep their order; it shuffles entries of its header,
    # but equal states must have equal digests: so there is one entry
    about = {"experiment": experiment, "round": state.round, "order": list(named)} | (
        {"line": line} if line else {}
    )
    content = safetensors.torch.save(named, metadata={"fedcover": json.dumps(about)})
    digest = hashlib.sha256(content).hexdigest()[:16]
    path = folder / f"round-{state.round:06d}.{digest}.safetensors"
    write_atomically(path, content)
    if keep:
        thin_out(folder, keep)
    return path


def thin_out(folder: Path, keep: int = KEPT) -> None:
    """Remove all checkpoints but the newest; a kill may have left one more."""
    for old in list_checkpoints(folder)[keep:]:
        old.path.unlink(missing_ok=True)


def copy_to_cpu(state: State, before: tuple[State, State] | None = None) -> State:
    """The same state on the CPU; what an earlier one shared with it, and what was fetched of that, is used again."""
    known: dict[int, Params] = {}
    if before is not None:
        there, here = (dict(_parts(each)) for each in before)
        known = {id(values): here[part] for part, values in there.items()}
    parts = [(part, known.get(id(values)) or on_cpu(values)) for part, values in _parts(state)]
    return _state_from_parts(parts, state.round)


def list_checkpoints(folder: Path) -> list[CheckpointFile]:
    """The checkpoints of a folder, newest first."""
    check_not_linked(folder)
    matches = [(path, _NAME.fullmatch(path.name)) for path in folder.glob("round-*.safetensors")]
    files = [CheckpointFile(path, int(match[1]), match[2]) for path, match in matches if match]
    return sorted(files, key=lambda file: file.round, reverse=True)


def load_checkpoint(file: CheckpointFile, experiment: str, device: torch.device | str) -> State:
    """The state in a checkpoint, refused if the file is damaged or belongs to another experiment."""
    try:
        content = read_bytes(
            file.path
        )  # all of it: a tensor mapped from a file would die with the file
        digest = hashlib.sha256(content).hexdigest()[:16]
        if digest != file.digest:
            raise RunError(
                f"checkpoint {file.path} is damaged: its digest is {digest}, not {file.digest}"
            )
        values = safetensors.torch.load(content)
        about = _about(content)
        belongs, round, order = about.get("experiment"), about.get("round"), about.get("order")
    except (OSError, SafetensorError, ValueError, AttributeError, RecursionError) as error:
        raise RunError(f"checkpoint {file.path} cannot be read: {reason(error)}") from error
    if belongs != experiment:
        raise RunError(f"checkpoint {file.path} belongs to another experiment: {belongs!r:.80}")
    if round != file.round:
        raise RunError(
            f"checkpoint {file.path} holds round {round!r:.80}, not {file.round} as its name says"
        )
    if not isinstance(order, list) or sorted(map(str, order)) != sorted(values):
        raise RunError(f"checkpoint {file.path} does not say in which order its tensors are")
    try:
        return _unflat({name: values[name].to(device) for name in order}, round)
    except (KeyError, ValueError, RuntimeError) as error:
        raise RunError(
            f"checkpoint {file.path} holds tensors that are no state of a run"
        ) from error


def _about(content: bytes) -> dict[str, Any]:
    """What a checkpoint says beside its tensors."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    about: dict[str, Any] = json.loads(header.get("__metadata__", {}).get("fedcover", "{}"))
    return about


def load_newest(
    folder: Path, experiment: str, device: torch.device | str
) -> tuple[State, dict[Path, str]]:
    """The newest state that is whole, and a sentence for each newer file that is not."""
    complaints: dict[Path, str] = {}
    for file in list_checkpoints(folder):
        try:
            return load_checkpoint(file, experiment, device), complaints
        except RunError as error:
            complaints[file.path] = str(error)
    raise RunError("; ".join(complaints.values()) or f"there is no checkpoint in {folder}")


def set_aside(path: Path) -> None:
    """Give an unusable checkpoint another name, so that it no longer counts as one of those that are kept."""
    try:
        path.replace(path.with_name(f"{path.name}.unusable"))
    except OSError as error:
        raise RunError(f"cannot rename {path}: {error.strerror}") from error


def _flat(state: State) -> dict[str, Tensor]:
    """All tensors of a state, on the CPU, under one name each: what it is, whose it is, and the tensor's own name.

    Counts are one tensor for all parameters: with one for each, a window of rounds would make a thousand.
    """
    named: dict[str, Tensor] = {}
    for part, values in _parts(state):
        named |= (
            {part: flatten(values)} if _is_counted(part) and values else _named([(part, values)])
        )
    return _apart(on_cpu(named))


def _apart(tensors: Params) -> Params:
    """Each tensor in memory of its own: the format refuses one that has two names."""
    begins: set[int] = set()
    apart: Params = {}
    for name, tensor in tensors.items():
        apart[name] = tensor.clone() if tensor.data_ptr() in begins else tensor
        begins.add(tensor.data_ptr())
    return apart


def _parts(state: State) -> list[tuple[str, Params]]:
    parts: list[tuple[str, Params]] = [("params", state.params), ("ever", state.coverage.ever)]
    parts += [(f"window/{age:04d}", counts) for age, counts in enumerate(state.coverage.window)]
    for kind in _KINDS:
        parts += [(f"{kind}/{key}", values) for key, values in getattr(state, kind).items()]
    return parts


def _named(parts: Iterable[tuple[str, Params]]) -> dict[str, Tensor]:
    return {f"{part}/{name}": tensor for part, values in parts for name, tensor in values.items()}


def on_cpu(tensors: Params) -> Params:
    """Contiguous tensors on the CPU, fetched from a GPU in one piece for each type: many small copies would wait.

    >>> on_cpu({"a": torch.ones(2, 1), "b": torch.zeros(3)})["b"].tolist()
    [0.0, 0.0, 0.0]
    """
    if isinstance(tensors, FlatParams):
        return tensors.like(tensors.flat.cpu())
    found = {name: t.contiguous() for name, t in tensors.items() if not t.is_cuda}
    there = {name: t for name, t in tensors.items() if t.is_cuda}
    for kind in {t.dtype: None for t in there.values()}:
        alike = {name: t for name, t in there.items() if t.dtype == kind}
        joined = torch.cat([t.flatten() for t in alike.values()]).cpu()
        sizes = [t.numel() for t in alike.values()]
        pieces = joined.split(sizes)  # type: ignore[no-untyped-call]
        found |= {
            n: piece.view(t.shape).clone()
            for (n, t), piece in zip(alike.items(), pieces, strict=True)
        }
    return {name: found[name] for name in tensors}


def _unflat(named: dict[str, Tensor], round: int) -> State:
    parts: dict[str, Params] = {}
    for (
        name,
        tensor,
    ) in (
        named.items()
    ):  # parameters come first; earlier versions named counts like them, one by one
        if _is_counted(name):
            parts[name] = FlatParams(tensor, named_shapes(parts["params"]))
        else:
            *part, own = name.split("/", 2 if name.startswith(_KEYED) else 1)
            parts.setdefault("/".join(part), {})[own] = tensor
    return _state_from_parts(parts.items(), round)


def _is_counted(part: str) -> bool:
    return part == "ever" or bool(_WINDOW.fullmatch(part))


def _state_from_parts(parts: Iterable[tuple[str, Params]], round: int) -> State:
    """The state of which these are the parts."""
    known = dict(parts)

    def by_key(kind: str) -> dict[str, Params]:
        return {
            part.split("/", 1)[1]: values
            for part, values in known.items()
            if part.startswith(f"{kind}/")
        }

    return State(
        round=round,
        params=known.get("params", {}),
        coverage=Coverage(tuple(by_key("window").values()), known.get("ever", {})),
        statistics=by_key("statistics"),
        measured=by_key("measured"),
        server=by_key("server"),
        private={int(client): values for client, values in by_key("private").items()},
    )
