"""The program, and the options that its commands share."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from fedcover.version import __version__

app = App(
    name="fedcover",
    help="Federated learning for fleets of unequal devices: every client trains the part of one model it can hold.",
    version=__version__,
)

Json = Annotated[bool, Parameter(help="Print JSON instead of a table.", negative="")]
Data = Annotated[Path | None, Parameter(help="Folder of the data sets; else $FEDCOVER_DATA, else a cache folder.")]
Device = Annotated[str, Parameter(help="auto, cpu or cuda.")]
EngineName = Annotated[str, Parameter(name="--engine", help="auto or a name from 'fedcover list engines'.")]
Deterministic = Annotated[bool, Parameter(help="On CUDA, only kernels that repeat bit for bit.", negative="")]
Precision = Annotated[str, Parameter(help="fp32, tf32 or bf16: what steps compute in; weights stay in float32.")]
DealtOut = Annotated[
    int | Literal["auto"],
    Parameter(help="Processes that the runs are dealt out to: a number, or auto, as many as pay (1 for few rounds)."),
]
Processes = Annotated[
    int | Literal["auto"],
    Parameter(help="Processes that share a round's clients: a number, or auto, as many as pay. See also torchrun."),
]
Threads = Annotated[int | None, Parameter(help="CPU threads; by default as many as the model is worth.")]
Plot = Annotated[
    Path | None, Parameter(help="Draw the curves into this file: .png, .svg, .pdf (needs fedcover[plot]).")
]
TensorBoard = Annotated[
    bool, Parameter(name="--tensorboard", help="Log into the run folder (needs fedcover[tensorboard]).", negative="")
]
