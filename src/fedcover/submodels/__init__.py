"""Sub-models: how a model is cut into units, sliced or masked, sent and counted."""
