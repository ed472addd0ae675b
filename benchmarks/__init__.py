"""Measurements that are too long for tests; their plans and results stand beside them."""
