"""How the nodes of a local federation get their configuration."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcover.flower.local_federation import node_config_argument

TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("'\"\\= \n\x7f"))


@given(st.fixed_dictionaries({"rows": TEXTS, "scales": TEXTS, "partition-id": st.integers(0, 99)}))
def test_flower_reads_every_configuration_of_a_node(config):
    flower_config = pytest.importorskip("flwr.common.config")
    assert flower_config.parse_config_args([node_config_argument(config)]) == config
