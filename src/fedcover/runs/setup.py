"""From a description to the things themselves: data on the device, the model, and all that a round needs."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedcover import registry
from fedcover.data import datasets
from fedcover.data.client_data import ClientDataInfo, PartitionedData, RemoteData, SyntheticData
from fedcover.data.partition import PARTITIONS
from fedcover.errors import InvalidValue, unknown
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
from fedcover.runs.machine import engine_for, has_small_steps, model_multiply_adds
from fedcover.server.aggregation import SERVERS
from fedcover.server.collectives import num_useful_processes, physical_cores
from fedcover.server.contracts import build_rule, checked_server
from fedcover.server.privacy import PRIVACY
from fedcover.server.round import Setup, cohort_of
from fedcover.submodels import unit_groups
from fedcover.training.engines import ENGINES, PRECISIONS
from fedcover.training.engines.runners import warn_once
from fedcover.training.local_sgd import SCHEDULES
from fedcover.types import Dataset, Engine, LocalTraining, Model, Policy, Source, Task

MAX_THREADS = 1024
STEP_SECONDS, MULTIPLY_ADDS_PER_SECOND = 2e-4, 1e10
"""What a local step takes at least, and per multiply-add of forward and backward: roughly, to see if processes pay.

The MLP of the MNIST job comes out at 0.7 ms a step; one core of an AMD EPYC took 0.17 (batched) to 0.6 (sequential).
"""


def check_device(name: str) -> None:
    """Refuse what is no device on any computer."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name):
        raise unknown("device", name, ["auto", "cpu", "cuda", "cuda:1"])


@dataclass(frozen=True, slots=True)
class Machine:
    """How a run is computed, never what: it may change the last digits, so a resumed run must keep it."""

    engine: str = "auto"
    device: str = "auto"
    threads: int | None = None
    deterministic: bool = False
    precision: str = "fp32"
    processes: int | str = 1

    def resolved(self) -> "Machine":
        """The same with what this computer decides: the device. Which engine pays depends on the run (`for_setup`)."""
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        check_device(device)
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise InvalidValue("device is 'cuda', but this computer has no CUDA device that torch can use; use 'cpu'")
        if self.engine not in ("auto", *ENGINES):
            raise unknown("engine", self.engine, ["auto", *ENGINES])
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        if self.precision == "tf32" and not device.startswith("cuda"):
            raise InvalidValue("precision is 'tf32', which only CUDA devices know; use 'fp32' or 'bf16'")
        if self.engine == "streams" and device == "cpu":
            warn_once("there is no GPU in use, so streams neither overlaps nor captures steps and is not fast")
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise InvalidValue(f"threads must be in 1..{MAX_THREADS}; got {self.threads}")
        if self.processes != "auto" and not (isinstance(self.processes, int) and 1 <= self.processes <= MAX_THREADS):
            raise InvalidValue(f"processes must be 'auto' or in 1..{MAX_THREADS}; got {self.processes!r}")
        return replace(self, device=device)

    def for_setup(self, setup: Setup) -> "Machine":
        """The same with engine, processes and threads decided: those that pay; one thread, unless a step is big."""
        work, local = model_multiply_adds(setup), setup.task.local
        processes = self.processes
        if isinstance(processes, str):
            cores = torch.cuda.device_count() if self.device.startswith("cuda") else physical_cores()
            samples = sum(client.samples for client in cohort_of(setup, 0)) * local.epochs * setup.rounds
            step = STEP_SECONDS + 3 * work * local.batch_size / MULTIPLY_ADDS_PER_SECOND
            enough = num_useful_processes(samples / local.batch_size * step, setup.active, cores)
            processes = 1 if setup.clip_updates is not None else enough
        elif processes > 1 and setup.clip_updates is not None:
            raise InvalidValue(
                f"processes must be 1 with clip_updates, which looks at updates as a whole; got {processes}"
            )
        threads = self.threads or (1 if has_small_steps(setup) else max(1, torch.get_num_threads() // processes))
        return replace(self, threads=threads, processes=processes, engine=engine_for(setup, self.engine, self.device))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Compute in this way for a while: so many threads, and on CUDA, if asked, only deterministic kernels."""
        threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        cudnn, tf32 = torch.backends.cudnn, self.precision != "fp32"
        before = cudnn.allow_tf32, torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        cudnn.allow_tf32 = tf32
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
            torch.use_deterministic_algorithms(True)
        torch.set_num_threads(self.threads or threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(strict)
            cudnn.allow_tf32 = before[0]
            torch.set_float32_matmul_precision(before[1])


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
    experiment: Experiment, machine: Machine, *, data: str | Path | None = None, parts: Overrides | None = None
) -> Setup:
    """Everything that stays the same from round to round."""
    own = parts or Overrides()
    names = display_names(experiment, own.model, own.dataset)
    told = getattr(own.engine, "holdings", {})  # an engine that reaches other machines knows what they hold
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
    local = LocalTraining(**{name: getattr(experiment, name) for name in LocalTraining.__dataclass_fields__})
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
    named = partial(ENGINES[engine_for(setup, machine.engine, machine.device)], precision=machine.precision)
    return replace(setup, engine=own.engine or named)


def _own_policy(policy: Policy) -> Policy:
    if not callable(policy):
        raise InvalidValue(f"policy must be a function here (name it in the experiment instead); got {policy!r:.80}")
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
            raise InvalidValue("validation: synthetic data is made, not split; use synthetic(validation_size=...)")
        make = registry.look_up("dataset", registry.parse("dataset", wanted), {"synthetic": SyntheticData})
        size = experiment.calibration
        made: Source = make(experiment.clients, seed=experiment.seed, calibration_size=size, device=device)
        return made
    if data is not None and not Path(data).expanduser().is_dir():
        raise InvalidValue(f"data must be a folder that exists; got {str(data)!r}")
    if dataset is None:
        dataset = build("dataset", wanted, {}) if ":" in wanted else datasets.load(wanted, data)
    if not isinstance(dataset, Dataset):
        raise InvalidValue(f"dataset {wanted!r} must make a fedcover Dataset; got {type(dataset).__name__}")
    check_dataset(dataset)
    if dataset.train.y.ndim > 1 and experiment.partition.partition("(")[0] in ("labels", "dirichlet"):
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
    return partial(_scheduled, look_up("schedule", experiment.schedule, SCHEDULES), experiment.lr, experiment.rounds)


def _scheduled(schedule: Any, lr: float, rounds: int, round: int) -> float:
    rate = lr * float(schedule(round, rounds))
    if not 0 <= rate <= MAX_FLOAT:
        raise InvalidValue(f"schedule: the learning rate of round {round} must be in 0..{MAX_FLOAT:g}; got {rate:g}")
    return rate
