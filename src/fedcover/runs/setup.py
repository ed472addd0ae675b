"""Build everything that a round needs from an experiment: data, model, policy, rule and engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedcover import registry
from fedcover.data import datasets
from fedcover.data.client_data import PartitionedData, RemoteData, SyntheticData
from fedcover.data.partition import PARTITIONS
from fedcover.errors import InvalidValue
from fedcover.models import params_and_buffers
from fedcover.models.meta_device import is_on_meta
from fedcover.policies import as_policy, policy_from_spec
from fedcover.runs.checks import (
    check_dataset,
    check_privacy,
    check_settings_apply,
    check_trainable,
    display_names,
)
from fedcover.runs.components import (
    as_model,
    build,
    build_model,
    build_recipe,
    look_up_spec,
    uses_submodels,
)
from fedcover.runs.experiment import MAX_FLOAT, Experiment
from fedcover.runs.machine import Machine, engine_for
from fedcover.runs.model_trial import check_outputs
from fedcover.runs.workload import Workload
from fedcover.server.averaging import AVERAGES
from fedcover.server.contracts import (
    build_rule,
    checked_average,
    checked_server,
    warn_of_unused_weights,
)
from fedcover.server.optimizers import SERVERS
from fedcover.server.privacy import PRIVACY
from fedcover.server.round_setup import Setup
from fedcover.submodels import unit_groups
from fedcover.submodels.cost import WeightUses
from fedcover.training.engines import ENGINES, as_engine
from fedcover.training.schedules import SCHEDULES
from fedcover.types import (
    ClientInfo,
    Dataset,
    Engine,
    EngineFunction,
    LocalTraining,
    Model,
    Policy,
    PolicyFunction,
    Recipe,
    Source,
    Task,
)

_ONE_LABEL_PARTITIONS = ("labels", "dirichlet")
"""Partitions that need exactly one label for each sample."""


@dataclass(frozen=True)
class Overrides:
    """Objects made in Python that replace what an experiment only names."""

    dataset: Dataset | None = None
    model: Model | nn.Module | None = None
    policy: PolicyFunction | None = None
    engine: EngineFunction | None = None
    source: Source | None = None
    build: Callable[..., Model] | None = None


def prepare(
    experiment: Experiment,
    machine: Machine,
    *,
    data: str | Path | None = None,
    overrides: Overrides | None = None,
) -> Setup:
    """Build the setup of a run: everything that stays the same from round to round.

    If the machine leaves its engine open, it is chosen here. A caller that also needs the machine's
    other choices calls `prepare_workload`, `Machine.for_workload` and `build_setup` itself.
    """
    workload = prepare_workload(experiment, machine.device, data=data, overrides=overrides)
    engine = engine_for(workload, machine.engine, machine.device)
    return build_setup(experiment, workload, replace(machine, engine=engine), overrides)


def prepare_workload(
    experiment: Experiment,
    device: str,
    *,
    data: str | Path | None = None,
    overrides: Overrides | None = None,
) -> Workload:
    """Build what a run has to compute: data, model and recipe, checked against each other."""
    overrides = overrides or Overrides()
    names = display_names(experiment, overrides.model, overrides.dataset)
    source = overrides.source or _build_run_source(experiment, device, data, overrides)
    recipe = build_recipe(experiment)
    model = _build_run_model(experiment, overrides, source, recipe)
    unit_groups.check_groups(model.groups, params_and_buffers(model.module))
    if not is_on_meta(model.module):
        model.module.to(device)
        check_outputs(experiment, names, model, source, recipe)
    check_trainable(model)
    check_settings_apply(experiment, names, model, recipe)
    inputs = source.test.x
    uses = WeightUses(model.module, inputs.shape[1:], inputs.dtype)
    return Workload(experiment, _build_task(experiment, model, source, recipe), uses)


def build_setup(
    experiment: Experiment,
    workload: Workload,
    machine: Machine,
    overrides: Overrides | None = None,
) -> Setup:
    """Build the setup of a run from its workload, on a machine whose engine is chosen."""
    overrides = overrides or Overrides()
    task = workload.task
    warn_of_unused_weights(experiment.rule, experiment.weights)
    privacy = build("privacy", experiment.privacy, PRIVACY)
    if privacy is not None:
        names = display_names(experiment, overrides.model, overrides.dataset)
        check_privacy(experiment, names, privacy, task.model, task.recipe)
    if overrides.policy is None:
        policy = build_policy(experiment)
    else:
        policy = _check_policy(overrides.policy)
    return Setup(
        experiment=experiment,
        task=task,
        uses=workload.uses,
        fleet=experiment.scaled_fleet,
        policy=policy,
        check_capacity=overrides.policy is not None or ":" in experiment.policy,
        engine=_build_engine(machine, overrides),
        rule=build_rule(experiment.rule),
        server=checked_server(experiment.server, build("server", experiment.server, SERVERS)),
        average=checked_average(
            experiment.average,
            build("average", experiment.average, AVERAGES),
            experiment.rounds,
        ),
        privacy=privacy,
        lr=_learning_rate(experiment),
    )


def _build_engine(machine: Machine, overrides: Overrides) -> Engine:
    """Return the engine that was given in Python, or the machine's."""
    if overrides.engine is not None:
        return as_engine(overrides.engine)
    return Engine(partial(ENGINES[machine.engine], precision=machine.precision))


def _build_task(experiment: Experiment, model: Model, source: Source, recipe: Recipe) -> Task:
    local = LocalTraining(
        epochs=experiment.epochs,
        batch_size=experiment.batch_size,
        lr=experiment.lr,
        momentum=experiment.momentum,
        weight_decay=experiment.weight_decay,
        clip=experiment.clip,
        augment=experiment.augment,
    )
    return Task(
        model,
        source,
        local,
        recipe,
        measure=experiment.capacity,
        norm=experiment.norm,
        scaler=experiment.scaler,
        seed=experiment.seed,
    )


def _build_run_model(
    experiment: Experiment, overrides: Overrides, source: Source, recipe: Recipe
) -> Model:
    """Build the experiment's model, or adapt the one given in Python."""
    shape = tuple(source.test.x.shape[1:])
    dtype = source.test.x.dtype
    if overrides.model is None:
        builder = overrides.build or build_model
        return builder(experiment, shape, source.classes, dtype)
    needs_groups = overrides.policy is not None or uses_submodels(experiment)
    return recipe.model(
        as_model(overrides.model, shape, source.classes, dtype, needs_groups=needs_groups)
    )


def _check_policy(policy: PolicyFunction) -> Policy:
    """Return a policy given in Python, or raise if it cannot be called with a view."""
    if not callable(policy):
        raise InvalidValue(
            "policy must be a function here (name it in the experiment instead); "
            f"got {policy!r:.80}"
        )
    if isinstance(policy, type):
        raise InvalidValue(
            "policy must be a function of a view, or an object that can be called with one; got "
            f"the class {policy.__name__}: give an object of it, such as {policy.__name__}(...)"
        )
    if isinstance(policy, partial) and isinstance(policy.func, Policy) and policy.func.grow:
        raise InvalidValue(
            f"policy must not be a partial of {policy.func}, which also changes the model between "
            "rounds: bind the options of both with .with_options(...)"
        )
    return as_policy(policy)


def build_policy(experiment: Experiment) -> Policy:
    """Return the experiment's policy with its options bound."""
    return policy_from_spec(experiment.policy)


def _build_run_source(
    experiment: Experiment, device: str, data: str | Path | None, overrides: Overrides
) -> Source:
    """Build the clients' data; an engine that reaches other machines knows what they hold."""
    client_info = None if overrides.engine is None else as_engine(overrides.engine).client_info
    return build_source(experiment, device, data, overrides.dataset, client_info)


def build_source(
    experiment: Experiment,
    device: str,
    data: str | Path | None,
    dataset: Dataset | None = None,
    client_info: Mapping[int, ClientInfo] | None = None,
) -> Source:
    """Build the clients' data: synthetic, a partitioned data set, or rows on other machines.

    `client_info` describes the rows that other machines hold.
    """
    if dataset is None and experiment.dataset.partition("(")[0] == "synthetic":
        return _build_synthetic_source(experiment, device)
    if data is not None and not Path(data).expanduser().is_dir():
        raise InvalidValue(f"data must be a folder that exists; got {str(data)!r}")
    if dataset is None:
        dataset = _load_dataset(experiment, data)
    check_dataset(dataset)
    partition_name = experiment.partition.partition("(")[0]
    if dataset.train.y.ndim > 1 and partition_name in _ONE_LABEL_PARTITIONS:
        raise InvalidValue(
            f"partition {experiment.partition!r} needs one label for each sample; "
            "this data has sequences"
        )
    dataset, validation = datasets.hold_out(dataset, experiment.validation, experiment.seed)
    remote = experiment.partition == "nodes"
    # with remote rows, the local data set is one single share: it only evaluates
    partition, clients = ("iid", 1) if remote else (experiment.partition, experiment.clients)
    split = build("partition", partition, PARTITIONS, dataset, clients, experiment.seed)
    local_data = PartitionedData(
        dataset,
        split,
        seed=experiment.seed,
        validation=validation,
        calibration_size=experiment.calibration,
        device=device,
    )
    if remote:
        return RemoteData(
            local_data, experiment.clients, {} if client_info is None else client_info
        )
    return local_data


def _build_synthetic_source(experiment: Experiment, device: str) -> Source:
    """Build data that is generated for each client on demand."""
    if experiment.partition != "iid":
        raise InvalidValue(
            "partition: synthetic data is generated for each client, not partitioned, so it must "
            "be left at 'iid' (for unequal labels use synthetic(skew=0.8)); "
            f"got {experiment.partition!r}"
        )
    if experiment.validation:
        raise InvalidValue(
            "validation: synthetic data is generated, not split; use synthetic(validation_size=...)"
        )
    spec = registry.parse("dataset", experiment.dataset)
    make_source = registry.look_up("dataset", spec, {"synthetic": SyntheticData})
    source: Source = make_source(
        experiment.clients,
        seed=experiment.seed,
        calibration_size=experiment.calibration,
        device=device,
    )
    return source


def _load_dataset(experiment: Experiment, data: str | Path | None) -> Dataset:
    """Load the data set that the experiment names, from the folder `data` if given."""
    name = experiment.dataset
    dataset = build("dataset", name, {}) if ":" in name else datasets.load(name, data)
    if not isinstance(dataset, Dataset):
        raise InvalidValue(
            f"dataset {name!r} must make a fedcover Dataset; got {type(dataset).__name__}"
        )
    return dataset


def _learning_rate(experiment: Experiment) -> "partial[float]":
    """Return the learning rate as a function of the round."""
    schedule = look_up_spec("schedule", experiment.schedule, SCHEDULES)
    return partial(_scheduled_lr, schedule, experiment.lr, experiment.rounds)


def _scheduled_lr(schedule: Any, lr: float, rounds: int, round: int) -> float:
    rate = lr * float(schedule(round, rounds))
    if not 0 <= rate <= MAX_FLOAT:
        raise InvalidValue(
            f"schedule: the learning rate of round {round} must be in 0..{MAX_FLOAT:g}; "
            f"got {rate:g}"
        )
    return rate
