"""From a description to the things themselves: data on the device, the model, and all that a round needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedcover import registry
from fedcover.data import datasets
from fedcover.data.client_data import ClientDataInfo, PartitionedData, RemoteData, SyntheticData
from fedcover.data.partition import PARTITIONS
from fedcover.errors import InvalidValue
from fedcover.models import params_and_buffers
from fedcover.models.meta_device import is_on_meta
from fedcover.policies import POLICIES, growth_of
from fedcover.runs.checks import (
    check_dataset,
    check_outputs,
    check_privacy,
    check_settings_apply,
    check_trainable,
    display_names,
)
from fedcover.runs.components import as_model, build, build_model, build_recipe, cuts, look_up
from fedcover.runs.experiment import MAX_FLOAT, Experiment
from fedcover.runs.machine import Machine, engine_for
from fedcover.server.contracts import build_rule, checked_server
from fedcover.server.optimizers import SERVERS
from fedcover.server.privacy import PRIVACY
from fedcover.server.round_setup import Setup
from fedcover.submodels import unit_groups
from fedcover.training.engines import ENGINES
from fedcover.training.schedules import SCHEDULES
from fedcover.types import Dataset, Engine, LocalTraining, Model, Policy, Source, Task


@dataclass(frozen=True)
class Overrides:
    """Things made in Python that replace what an experiment only names."""

    dataset: Dataset | None = None
    model: Model | nn.Module | None = None
    policy: Policy | None = None
    engine: Engine | None = None
    source: Source | None = None
    build: Callable[..., Model] | None = None


def prepare(
    experiment: Experiment,
    machine: Machine,
    *,
    data: str | Path | None = None,
    parts: Overrides | None = None,
) -> Setup:
    """Everything that stays the same from round to round."""
    own = parts or Overrides()
    names = display_names(experiment, own.model, own.dataset)
    told = getattr(
        own.engine, "holdings", {}
    )  # an engine that reaches other machines knows what they hold
    source = own.source or build_source(experiment, machine.device, data, own.dataset, told)
    shape = tuple(source.test.x.shape[1:])
    recipe = build_recipe(experiment)
    dtype = source.test.x.dtype
    if own.model is None:
        model = (own.build or build_model)(experiment, shape, source.classes, dtype)
    else:
        cut = own.policy is not None or cuts(experiment)
        model = recipe.model(as_model(own.model, shape, source.classes, dtype, cut=cut))
    unit_groups.check_groups(model.groups, params_and_buffers(model.module))
    if not is_on_meta(model.module):
        model.module.to(machine.device)
        check_outputs(experiment, names, model, source, recipe)
    check_trainable(model)
    check_settings_apply(experiment, names, model, recipe)
    privacy = build("privacy", experiment.privacy, PRIVACY)
    if privacy is not None:
        check_privacy(experiment, names, privacy, model, recipe)
    local = LocalTraining(
        **{name: getattr(experiment, name) for name in LocalTraining.__dataclass_fields__}
    )
    switches = {name: getattr(experiment, name) for name in ("norm", "scaler", "seed")}
    policy = build_policy(experiment) if own.policy is None else _own_policy(own.policy)
    setup = Setup(
        task=Task(model, source, local, recipe, measure=experiment.capacity, **switches),
        fleet=experiment.scaled_fleet,
        policy=policy,
        growth=growth_of(policy),
        check_capacity=own.policy is not None or ":" in experiment.policy,
        engine=ENGINES["sequential"],
        rule=build_rule(experiment.rule),
        server=checked_server(experiment.server, build("server", experiment.server, SERVERS)),
        privacy=privacy,
        lr=_learning_rate(experiment),
        **{
            name: getattr(experiment, name)
            for name in (
                "clients", "active", "assignment", "capacity", "drop_out", "weights", "uncovered", "rounds", "window",
                "evaluate_every", "local_every", "evaluation", "clip_updates",
            )
        },
    )  # fmt: skip
    named = partial(
        ENGINES[engine_for(setup, machine.engine, machine.device)], precision=machine.precision
    )
    return replace(setup, engine=own.engine or named)


def _own_policy(policy: Policy) -> Policy:
    if not callable(policy):
        raise InvalidValue(
            f"policy must be a function here (name it in the experiment instead); got {policy!r:.80}"
        )
    if isinstance(policy, type):
        raise InvalidValue(
            f"policy must be a function of a view, or an object that can be called with one; got the class "
            f"{policy.__name__}: give an object of it, such as {policy.__name__}(...)"
        )
    return policy


def build_policy(experiment: Experiment) -> Policy:
    """The experiment's policy with its options bound."""
    return look_up("policy", experiment.policy, POLICIES)  # type: ignore[no-any-return]


def build_source(
    experiment: Experiment,
    device: str,
    data: str | Path | None,
    dataset: Dataset | None = None,
    told: Mapping[int, ClientDataInfo] | None = None,
) -> Source:
    """The clients' data: made on demand, a data set that is partitioned, or rows of which other machines tell."""
    wanted = experiment.dataset
    if dataset is None and wanted.partition("(")[0] == "synthetic":
        if experiment.partition != "iid":
            raise InvalidValue(
                f"partition: synthetic data is made for each client, not shared out, so it must be left at 'iid' (for "
                f"unequal labels use synthetic(skew=0.8)); got {experiment.partition!r}"
            )
        if experiment.validation:
            raise InvalidValue(
                "validation: synthetic data is made, not split; use synthetic(validation_size=...)"
            )
        make = registry.look_up(
            "dataset", registry.parse("dataset", wanted), {"synthetic": SyntheticData}
        )
        size = experiment.calibration
        made: Source = make(
            experiment.clients, seed=experiment.seed, calibration_size=size, device=device
        )
        return made
    if data is not None and not Path(data).expanduser().is_dir():
        raise InvalidValue(f"data must be a folder that exists; got {str(data)!r}")
    if dataset is None:
        dataset = build("dataset", wanted, {}) if ":" in wanted else datasets.load(wanted, data)
    if not isinstance(dataset, Dataset):
        raise InvalidValue(
            f"dataset {wanted!r} must make a fedcover Dataset; got {type(dataset).__name__}"
        )
    check_dataset(dataset)
    if dataset.train.y.ndim > 1 and experiment.partition.partition("(")[0] in (
        "labels",
        "dirichlet",
    ):
        raise InvalidValue(
            f"partition {experiment.partition!r} needs one label for each sample; this data has sequences"
        )
    dataset, held_out = datasets.hold_out(dataset, experiment.validation, experiment.seed)
    remote = experiment.partition == "nodes"
    how, clients = ("iid", 1) if remote else (experiment.partition, experiment.clients)
    split = build("partition", how, PARTITIONS, dataset, clients, experiment.seed)
    here = PartitionedData(
        dataset, split, seed=experiment.seed, validation=held_out,
        calibration_size=experiment.calibration, device=device,
    )  # fmt: skip
    return RemoteData(here, experiment.clients, {} if told is None else told) if remote else here


def _learning_rate(experiment: Experiment) -> "partial[float]":
    return partial(
        _scheduled,
        look_up("schedule", experiment.schedule, SCHEDULES),
        experiment.lr,
        experiment.rounds,
    )


def _scheduled(schedule: Any, lr: float, rounds: int, round: int) -> float:
    rate = lr * float(schedule(round, rounds))
    if not 0 <= rate <= MAX_FLOAT:
        raise InvalidValue(
            f"schedule: the learning rate of round {round} must be in 0..{MAX_FLOAT:g}; got {rate:g}"
        )
    return rate
