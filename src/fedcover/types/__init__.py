"""Define the data types and function signatures that all other modules share."""

from fedcover.types.data import ClientInfo, Dataset, Samples, Shard, Source
from fedcover.types.model import Count, Cut, Model, Params, Reduction, UnitGroup
from fedcover.types.rounds import Client, Coverage, GrowthStep, Policy, PolicyFunction, View
from fedcover.types.training import (
    Assignment,
    Batch,
    Carry,
    Engine,
    EngineFunction,
    Forward,
    LocalTraining,
    Outcome,
    Recipe,
    Rule,
    State,
    Task,
    Update,
)

__all__ = [
    "Assignment",
    "Batch",
    "Carry",
    "Client",
    "ClientInfo",
    "Count",
    "Coverage",
    "Cut",
    "Dataset",
    "Engine",
    "EngineFunction",
    "Forward",
    "GrowthStep",
    "LocalTraining",
    "Model",
    "Outcome",
    "Params",
    "Policy",
    "PolicyFunction",
    "Recipe",
    "Reduction",
    "Rule",
    "Samples",
    "Shard",
    "Source",
    "State",
    "Task",
    "UnitGroup",
    "Update",
    "View",
]
