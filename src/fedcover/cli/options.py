"""The command-line program, and the options that several commands share."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter, Token

from fedcover.errors import InvalidValue
from fedcover.runs.experiment import Experiment, read_experiment
from fedcover.runs.launch import torchrun_rank, torchrun_size
from fedcover.runs.machine import Machine
from fedcover.runs.toml_fields import parse_change
from fedcover.version import __version__

DATA_FILE_SUFFIXES = (".npz", ".safetensors")

app = App(
    name="fedcover",
    help="Federated learning on unequal devices: each client trains the part of one model that"
    " fits it.",
    version=__version__,
)


def to_integer(kind: object, tokens: Sequence[Token]) -> int:
    """Convert a word to an integer; cyclopts itself would round 2.5."""
    word = tokens[0].value
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"must be a whole number; got {word!r}") from None


def to_integer_or_auto(kind: object, tokens: Sequence[Token]) -> int | str:
    """Convert a word to an integer, unless it is "auto"."""
    if tokens[0].value == "auto":
        return "auto"
    return to_integer(kind, tokens)


Whole = Annotated[int, Parameter(converter=to_integer)]
MaybeWhole = Annotated[int | None, Parameter(converter=to_integer)]
WholeOrAuto = Annotated[int | Literal["auto"], Parameter(converter=to_integer_or_auto)]

ExperimentFile = Annotated[
    Path | None, Parameter(help="An experiment as a TOML file (default: all default values).")
]
Set = Annotated[
    tuple[str, ...], Parameter(help="key=value, overrides the file. Can be given several times.")
]
Runs = Annotated[Path, Parameter(help="Parent folder of the run folders.")]
Json = Annotated[bool, Parameter(help="Print JSON instead of a table.", negative="")]
Overwrite = Annotated[
    bool, Parameter(help="Delete an existing run of this name and start again.", negative="")
]
Data = Annotated[
    Path | None,
    Parameter(help="Folder of the data sets (default: $FEDCOVER_DATA, or a cache folder)."),
]
Device = Annotated[str, Parameter(help="auto, cpu or cuda.")]
EngineName = Annotated[
    str, Parameter(name="--engine", help="auto, or a name from 'fedcover list engines'.")
]
Deterministic = Annotated[
    bool, Parameter(help="Use only bitwise reproducible kernels on CUDA.", negative="")
]
Precision = Annotated[
    str,
    Parameter(help="Precision of the local steps: fp32, tf32 or bf16. Weights stay in float32."),
]
ParallelRuns = Annotated[
    WholeOrAuto,
    Parameter(help="Worker processes that share the runs: a number, or auto."),
]
Processes = Annotated[
    WholeOrAuto,
    Parameter(
        help="Worker processes that share the clients of a round: a number, or auto. Works with"
        " torchrun, too."
    ),
]
Threads = Annotated[
    MaybeWhole,
    Parameter(help="CPU threads (default: 1 for small models, otherwise all cores)."),
]
Plot = Annotated[
    Path | None,
    Parameter(help="Plot the curves to this .png, .svg or .pdf file (needs fedcover[plot])."),
]
TensorBoard = Annotated[
    bool,
    Parameter(
        name="--tensorboard",
        help="Write TensorBoard logs to the run folder (needs fedcover[tensorboard]).",
        negative="",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The options of `run` and `resume` that describe the computer."""

    device: Device = "auto"
    engine: EngineName = "auto"
    threads: Threads = None
    deterministic: Deterministic = False
    precision: Precision = "fp32"
    processes: Processes = "auto"

    def machine(self) -> Machine:
        """Return the machine; under torchrun it uses all processes that torchrun started."""
        return Machine(
            engine=self.engine,
            device=self.device,
            threads=self.threads,
            deterministic=self.deterministic,
            precision=self.precision,
            processes=self._process_count(),
        )

    def _process_count(self) -> int | str:
        if torchrun_rank() is None:
            return self.processes
        if self.processes not in ("auto", torchrun_size()):
            raise InvalidValue(
                f"processes: torchrun has started {torchrun_size()}; got {self.processes}"
            )
        return torchrun_size()


DEFAULT_MACHINE_OPTIONS = MachineOptions()


def load_experiment(file: Path | None, changes: Sequence[str]) -> Experiment:
    """Read an experiment from a TOML file, or take the defaults, and apply changes.

    Modules and data files that the experiment names may be in the folder of the file.
    """
    add_working_folder_to_path()
    changed_fields = dict(parse_change(text) for text in changes)
    if file is None:
        return _with_absolute_dataset(Experiment(**changed_fields), None)
    sys.path.insert(1, str(file.parent.resolve()))
    return _with_absolute_dataset(read_experiment(file, changed_fields), file)


def add_working_folder_to_path() -> None:
    """Make modules in the working folder importable, so that `module:function` finds them.

    Commands that only look at files do not call this.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")


def _with_absolute_dataset(experiment: Experiment, file: Path | None) -> Experiment:
    """Make the path of a data file absolute, so that the run can be resumed from any folder."""
    dataset = Path(experiment.dataset)
    if dataset.suffix not in DATA_FILE_SUFFIXES:
        return experiment
    if file is not None and (file.parent / dataset).exists():
        dataset = file.parent / dataset
    return experiment.model_copy(update={"dataset": str(dataset.expanduser().resolve())})
