"""What the rounds of a run compute once and use again."""

from dataclasses import dataclass, field

from fedcover.server.cohort import privacy_accountant
from fedcover.server.evaluation import ReusedGlobalModule
from fedcover.server.privacy import PrivacyAccountant
from fedcover.server.round_setup import Setup
from fedcover.submodels.reductions import Slices


@dataclass(frozen=True, slots=True, eq=False)
class RoundCache:
    """The caches of one run. They save time and never change a result.

    A run has one for all of its rounds; a single round may have one of its own.

    Attributes:
        accountant: Counts the privacy loss; None without privacy.
        slices: The slices of the last round by their encoding, so that equal ones are reused.
        global_module: The module in which the global model is evaluated.
    """

    accountant: PrivacyAccountant | None
    slices: dict[bytes, Slices] = field(default_factory=dict)
    global_module: ReusedGlobalModule = field(default_factory=ReusedGlobalModule)

    @classmethod
    def of(cls, setup: Setup) -> "RoundCache":
        """Return empty caches for the rounds of a setup."""
        return cls(privacy_accountant(setup))
