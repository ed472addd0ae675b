"""The part of the server's state that travels to a client."""

import torch

from fedcover.flower.payloads import (
    expected_part,
    gather_kept,
    prefix_names,
    scatter_kept,
    unpack_sections,
)
from fedcover.models.norms import running_statistics, statistics_key
from fedcover.server.safetensors_codec import pack_arrays, unpack_arrays
from fedcover.submodels.reductions import without_masks
from fedcover.tensors import to_device
from fedcover.types import Client, Params, Reduction, State, Task

_MEASURED = "measured-"
"""The prefix of the sections that hold what clients measured."""


def build_payload(task: Task, state: State, client: Client, reduction: Reduction) -> bytes:
    """Pack a client's part of the parameters, norm statistics and measurements."""
    statistics = state.statistics.get(statistics_key(task.norm, client.capacity) or "", {})
    uncut = without_masks(reduction)
    measured = {
        f"{_MEASURED}{kind}": uncut.extract(tensors) for kind, tensors in state.measured.items()
    }
    params = gather_kept(reduction, reduction.extract(state.params))
    sections = {"params": params, "statistics": reduction.extract(statistics), **measured}
    return pack_arrays(prefix_names(sections))


def state_from_payload(
    payload: bytes,
    task: Task,
    client: Client,
    reduction: Reduction,
    round: int,
    private: Params,
    device: torch.device,
) -> State:
    """Read the state that a client may know.

    Its tensors are a `PartialParams`, unless the client's part is masked instead of cut.
    """
    module = task.model.module
    params = {name: p.detach() for name, p in module.named_parameters()}
    key = statistics_key(task.norm, client.capacity)
    statistics = running_statistics(module) if key else {}
    measured = _measured_params(payload, params)
    uncut = without_masks(reduction)
    expected = {
        "params": expected_part(reduction, params),
        "statistics": expected_part(reduction, statistics),
    }
    for kind, tensors in measured.items():
        expected[f"{_MEASURED}{kind}"] = expected_part(uncut, tensors)
    sections = unpack_sections(payload, expected)
    client_statistics: dict[str, Params] = {}
    if key:
        client_statistics[key] = scatter_kept(reduction, sections["statistics"], statistics, device)
    return State(
        round,
        scatter_kept(reduction, sections["params"], params, device),
        client_statistics,
        measured={
            kind: scatter_kept(uncut, sections[f"{_MEASURED}{kind}"], tensors, device)
            for kind, tensors in measured.items()
        },
        private={client.id: to_device(private, device)},
    )


def _measured_params(payload: bytes, params: Params) -> dict[str, Params]:
    """Return the parameters that each kind of measurement in a payload is about."""
    measured: dict[str, Params] = {}
    for array_name in unpack_arrays(payload):
        section, name = array_name.split("/", 1)
        if section.startswith(_MEASURED):
            tensors = measured.setdefault(section.removeprefix(_MEASURED), {})
            if name in params:
                tensors[name] = params[name]
    return measured
