"""The convergence theorems as pure functions: from constants to bounds, term by term."""

from fedcover.theory.bounds import BOUNDS as BOUNDS
from fedcover.theory.quantities import Bound as Bound
from fedcover.theory.quantities import Condition as Condition
from fedcover.theory.quantities import Constants as Constants
from fedcover.theory.quantities import LocalSteps as LocalSteps
from fedcover.theory.quantities import RoundQuantities as RoundQuantities
