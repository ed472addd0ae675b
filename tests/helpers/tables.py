"""The entries of the tables as fields of small experiments.

A new entry is run by its name alone. Only what cannot be run so is listed here.
"""

from fedcover.policies import POLICIES
from fedcover.server.aggregation import OVER, RULES
from fedcover.training.recipes import RECIPES

POLICY_FIELDS = {
    "regions": {
        "policy": "regions(codename='147256')", "fleet": "1x1 + 1x0.75 + 1x0.5 + 1x0.75 + 2x0.5",
        "assignment": "slot", "active": 6,
    },
    "prunefl": {"policy": "prunefl(every=1)", "fleet": "1x0.5"},
    "planned": {"policy": "planned(gamma=1)"},
}  # fmt: skip
RECIPE_FIELDS = {
    "prunefl": {"recipe": "prunefl(every=1)", **POLICY_FIELDS["prunefl"]},
    "hermes": {"recipe": "hermes(step=0.5, good_enough=0.0)", "policy": "full"},
    "fiarse": {"policy": "magnitude"},
}

EVERY_POLICY = {name: {"policy": name, **POLICY_FIELDS.get(name, {})} for name in sorted(POLICIES)}
EVERY_RECIPE = {
    name: {"recipe": name, "policy": "prefix", **RECIPE_FIELDS.get(name, {})}
    for name in sorted(RECIPES)
}
EVERY_RULE = [*RULES, *(f"coverage_mean(over={over})" for over in OVER), "trimmed_mean(share=0.2)"]


def model_for(recipe: str) -> str:
    """The small model that a recipe trains: one with several exits where it needs them."""
    return "depth_resnet" if RECIPES[recipe]().exits else "mlp"
