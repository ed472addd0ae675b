"""Measurements that take too long for tests, with their plans and results."""
