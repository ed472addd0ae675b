"""Checkpoint files: written atomically, and named after the digest of their content."""

import hashlib
import json
import re
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
_LEFTOVER = re.compile(r"\.(.+\.(?:safetensors|json|jsonl|toml))\.\d+")
_WINDOW = re.compile(r"window/\d+")

_KINDS = ("statistics", "measured", "server", "private", "average")
"""Fields of a state that hold several dicts of tensors, by key."""

_KEYED = tuple(f"{kind}/" for kind in ("window", *_KINDS))
"""Prefixes of names whose second part is a key."""

KEPT = 2
"""How many checkpoints stay: the newest, and an older one in case the newest is damaged."""


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A checkpoint file: the number of finished rounds, and the digest of its content."""

    path: Path
    round: int
    digest: str

    def line(self) -> dict[str, Any] | None:
        """Return the line of metrics that was written with the state, if any."""
        line = _read_metadata(read_bytes(self.path)).get("line")
        return line if isinstance(line, dict) else None


# ── files ───────────────────────────────────────────────────────────────────────────────────────


def save_checkpoint(
    folder: Path,
    state: State,
    experiment: str,
    *,
    keep: int | None = KEPT,
    line: dict[str, Any] | None = None,
) -> Path:
    """Write a state, optionally with a line of metrics; then remove all but the newest files.

    `experiment` is the digest of the experiment. With `keep=None` no file is removed.
    """
    tensors = _tensors_by_name(state)
    # the format sorts tensors, but sums over all of them need their order
    metadata = {"experiment": experiment, "round": state.round, "order": list(tensors)}
    if line:
        metadata["line"] = line
    # one entry only: the format shuffles entries, and equal states must have equal digests
    header = {"fedcover": json.dumps(metadata)}
    content = safetensors.torch.save(tensors, metadata=header)
    path = folder / f"round-{state.round:06d}.{_digest(content)}.safetensors"
    write_atomically(path, content)
    if keep:
        thin_out(folder, keep)
    return path


def list_checkpoints(folder: Path) -> list[CheckpointFile]:
    """Return the checkpoints in a folder, newest first."""
    check_not_linked(folder)
    files = []
    for path in folder.glob("round-*.safetensors"):
        if match := _NAME.fullmatch(path.name):
            files.append(CheckpointFile(path, int(match[1]), match[2]))
    return sorted(files, key=lambda file: file.round, reverse=True)


def thin_out(folder: Path, keep: int = KEPT) -> None:
    """Remove all checkpoints but the newest; a killed process may have left one too many."""
    for file in list_checkpoints(folder)[keep:]:
        file.path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove half-written files of a killed process; only for the process that may write."""
    for path in folder.glob(".*.*"):
        if _LEFTOVER.fullmatch(path.name):
            path.unlink(missing_ok=True)


def set_aside(path: Path) -> None:
    """Rename an unusable checkpoint, so that it does not count as one of those that stay."""
    try:
        path.replace(path.with_name(f"{path.name}.unusable"))
    except OSError as error:
        raise RunError(f"cannot rename {path}: {error.strerror}") from error


def load_newest(
    folder: Path, experiment: str, device: torch.device | str
) -> tuple[State, dict[Path, str]]:
    """Return the newest intact state, and an error message for each newer damaged file."""
    messages: dict[Path, str] = {}
    for file in list_checkpoints(folder):
        try:
            return load_checkpoint(file, experiment, device), messages
        except RunError as error:
            messages[file.path] = str(error)
    raise RunError("; ".join(messages.values()) or f"there is no checkpoint in {folder}")


def load_checkpoint(file: CheckpointFile, experiment: str, device: torch.device | str) -> State:
    """Load a state; raise if its file is damaged or belongs to another experiment."""
    tensors, metadata = _read_tensors(file)
    owner, round, order = (metadata.get(key) for key in ("experiment", "round", "order"))
    if owner != experiment:
        raise RunError(f"checkpoint {file.path} belongs to another experiment: {owner!r:.80}")
    if round != file.round:
        raise RunError(
            f"checkpoint {file.path} holds round {round!r:.80}, not {file.round} as its name says"
        )
    if not isinstance(order, list) or sorted(map(str, order)) != sorted(tensors):
        raise RunError(f"checkpoint {file.path} does not say in which order its tensors are")
    try:
        on_device = {name: tensors[name].to(device) for name in order}
        return _state_from_tensors(on_device, file.round)
    except (KeyError, ValueError, RuntimeError) as error:
        raise RunError(
            f"checkpoint {file.path} holds tensors that are not a state of a run"
        ) from error


def _read_tensors(file: CheckpointFile) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file's tensors and metadata, and check its digest."""
    try:
        # read as a whole: tensors mapped from a file would be lost with the file
        content = read_bytes(file.path)
        digest = _digest(content)
        if digest != file.digest:
            raise RunError(
                f"checkpoint {file.path} is damaged: its digest is {digest}, not {file.digest}"
            )
        tensors = safetensors.torch.load(content)
        metadata = _read_metadata(content)
        if not isinstance(metadata, dict):
            raise ValueError("its metadata is not a JSON object")
        return tensors, metadata
    except (OSError, SafetensorError, ValueError, AttributeError, RecursionError) as error:
        raise RunError(f"checkpoint {file.path} cannot be read: {reason(error)}") from error


def _read_metadata(content: bytes) -> dict[str, Any]:
    """Read fedcover's entry in the header of a safetensors file."""
    header_length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_length])
    entry = header.get("__metadata__", {}).get("fedcover", "{}")
    metadata: dict[str, Any] = json.loads(entry)
    return metadata


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


# ── copies on the CPU ───────────────────────────────────────────────────────────────────────────


def copy_to_cpu(state: State, previous: tuple[State, State] | None = None) -> State:
    """Return a copy of a state on the CPU.

    `previous` is an earlier state and its copy. What both states share is not copied again.
    """
    copies: dict[int, Params] = {}
    if previous is not None:
        original_parts, copied_parts = (dict(_parts(each)) for each in previous)
        copies = {id(values): copied_parts[part] for part, values in original_parts.items()}
    parts = [(part, copies.get(id(values)) or on_cpu(values)) for part, values in _parts(state)]
    return _state_from_parts(dict(parts), state.round)


def on_cpu(tensors: Params) -> Params:
    """Return contiguous tensors on the CPU.

    GPU tensors of one type are copied as one: many small copies would take longer.

    >>> on_cpu({"a": torch.ones(2, 1), "b": torch.zeros(3)})["b"].tolist()
    [0.0, 0.0, 0.0]
    """
    if isinstance(tensors, FlatParams):
        return tensors.like(tensors.flat.cpu())
    copies: Params = {}
    by_dtype: dict[torch.dtype, Params] = {}
    for name, tensor in tensors.items():
        if tensor.is_cuda:
            by_dtype.setdefault(tensor.dtype, {})[name] = tensor
        else:
            copies[name] = tensor.contiguous()
    for group in by_dtype.values():
        joined = torch.cat([tensor.flatten() for tensor in group.values()]).cpu()
        sizes = [tensor.numel() for tensor in group.values()]
        pieces = joined.split(sizes)  # type: ignore[no-untyped-call]
        for (name, tensor), piece in zip(group.items(), pieces, strict=True):
            copies[name] = piece.view(tensor.shape).clone()
    return {name: copies[name] for name in tensors}


# ── a state as named tensors, and back ──────────────────────────────────────────────────────────


def _parts(state: State) -> list[tuple[str, Params]]:
    """Return the dicts of tensors that a state consists of, each with a name."""
    parts: list[tuple[str, Params]] = [("params", state.params), ("ever", state.coverage.ever)]
    for age, counts in enumerate(state.coverage.window):
        parts.append((f"window/{age:04d}", counts))
    for kind in _KINDS:
        for key, values in getattr(state, kind).items():
            parts.append((f"{kind}/{key}", values))
    return parts


def _tensors_by_name(state: State) -> dict[str, Tensor]:
    """Return all tensors of a state on the CPU, each under the name of its part and its own.

    The counts of all parameters are one tensor. Otherwise a window of rounds would need a
    thousand of them.
    """
    tensors: dict[str, Tensor] = {}
    for part, values in _parts(state):
        if _is_counts(part) and values:
            tensors[part] = flatten(values)
        else:
            tensors |= {f"{part}/{name}": tensor for name, tensor in values.items()}
    return _without_shared_memory(on_cpu(tensors))


def _without_shared_memory(tensors: Params) -> Params:
    """Copy tensors that share memory with another one, which the format does not allow."""
    addresses: set[int] = set()
    separate: Params = {}
    for name, tensor in tensors.items():
        separate[name] = tensor.clone() if tensor.data_ptr() in addresses else tensor
        addresses.add(tensor.data_ptr())
    return separate


def _state_from_tensors(tensors: dict[str, Tensor], round: int) -> State:
    """Build the state that `_tensors_by_name` has taken apart.

    Parameters come first. Earlier versions named counts like parameters, one by one.
    """
    parts: dict[str, Params] = {}
    for full_name, tensor in tensors.items():
        if _is_counts(full_name):
            parts[full_name] = FlatParams(tensor, named_shapes(parts["params"]))
        else:
            splits = 2 if full_name.startswith(_KEYED) else 1
            *prefix, name = full_name.split("/", splits)
            parts.setdefault("/".join(prefix), {})[name] = tensor
    return _state_from_parts(parts, round)


def _is_counts(part: str) -> bool:
    return part == "ever" or bool(_WINDOW.fullmatch(part))


def _state_from_parts(parts: dict[str, Params], round: int) -> State:
    """Build the state that `_parts` has taken apart."""
    window = tuple(_values_by_key(parts, "window").values())
    private = _values_by_key(parts, "private")
    return State(
        round=round,
        params=parts.get("params", {}),
        coverage=Coverage(window, parts.get("ever", {})),
        statistics=_values_by_key(parts, "statistics"),
        measured=_values_by_key(parts, "measured"),
        server=_values_by_key(parts, "server"),
        private={int(client): values for client, values in private.items()},
        average=_values_by_key(parts, "average"),
    )


def _values_by_key(parts: dict[str, Params], kind: str) -> dict[str, Params]:
    """Return the parts of one kind by their keys."""
    prefix = f"{kind}/"
    return {
        part.removeprefix(prefix): values
        for part, values in parts.items()
        if part.startswith(prefix)
    }
