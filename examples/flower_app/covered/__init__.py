"""A Flower App of your own with sub-models: what both sides know is in `task`."""
