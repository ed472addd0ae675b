"""The program, and the options that its commands share."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter, Token

from fedcover.runs.experiment import Experiment, read_experiment
from fedcover.runs.toml_fields import parse_change
from fedcover.version import __version__

app = App(
    name="fedcover",
    help="Federated learning for fleets of unequal devices: every client trains the part of one model it can hold.",
    version=__version__,
)


def whole(kind: object, given: Sequence[Token]) -> int:
    """A whole number; cyclopts would round 2.5."""
    try:
        return int(given[0].value)
    except ValueError:
        raise ValueError(f"must be a whole number; got {given[0].value!r}") from None


def whole_or_auto(kind: object, given: Sequence[Token]) -> int | str:
    """A whole number, or the word auto."""
    return "auto" if given[0].value == "auto" else whole(kind, given)


Whole = Annotated[int, Parameter(converter=whole)]
MaybeWhole = Annotated[int | None, Parameter(converter=whole)]
WholeOrAuto = Annotated[int | Literal["auto"], Parameter(converter=whole_or_auto)]
Json = Annotated[bool, Parameter(help="Print JSON instead of a table.", negative="")]
Overwrite = Annotated[
    bool, Parameter(help="Begin anew where there is a run already: that one is lost.", negative="")
]
Data = Annotated[
    Path | None,
    Parameter(help="Folder of the data sets; else $FEDCOVER_DATA, else a cache folder."),
]
Device = Annotated[str, Parameter(help="auto, cpu or cuda.")]
EngineName = Annotated[
    str, Parameter(name="--engine", help="auto or a name from 'fedcover list engines'.")
]
Deterministic = Annotated[
    bool, Parameter(help="On CUDA, only kernels that repeat bit for bit.", negative="")
]
Precision = Annotated[
    str, Parameter(help="fp32, tf32 or bf16: what steps compute in; weights stay in float32.")
]
ParallelRuns = Annotated[
    WholeOrAuto,
    Parameter(
        help="Processes that the runs are dealt out to: a number, or auto, as many as pay (1 for few rounds)."
    ),
]
Processes = Annotated[
    WholeOrAuto,
    Parameter(
        help="Processes that share a round's clients: a number, or auto, as many as pay. See also torchrun."
    ),
]
Threads = Annotated[
    MaybeWhole, Parameter(help="CPU threads; by default as many as the model is worth.")
]
Plot = Annotated[
    Path | None,
    Parameter(help="Draw the curves into this file: .png, .svg, .pdf (needs fedcover[plot])."),
]
TensorBoard = Annotated[
    bool,
    Parameter(
        name="--tensorboard",
        help="Log into the run folder (needs fedcover[tensorboard]).",
        negative="",
    ),
]


def load_experiment(file: Path | None, changes: Sequence[str]) -> Experiment:
    """The experiment of a TOML file, or the defaults, with changes; functions and files it names may lie beside it."""
    add_working_folder_to_path()
    parsed = dict(parse_change(text) for text in changes)
    if file is None:
        return _with_absolute_dataset(Experiment(**parsed), None)
    sys.path.insert(1, str(file.parent.resolve()))
    return _with_absolute_dataset(read_experiment(file, parsed), file)


def add_working_folder_to_path() -> None:
    """Let `package.module:function` find the user's own files; not for commands that only look at files."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def _with_absolute_dataset(wanted: Experiment, file: Path | None) -> Experiment:
    """The experiment with the full path of its data file, if it names one, so that it can be resumed from anywhere."""
    if Path(wanted.dataset).suffix not in (".npz", ".safetensors"):
        return wanted
    beside = file.parent / wanted.dataset if file else Path(wanted.dataset)
    found = beside if beside.exists() else Path(wanted.dataset)
    return wanted.model_copy(update={"dataset": str(found.expanduser().resolve())})
