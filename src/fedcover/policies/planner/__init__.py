"""Exact plans of which client trains which units."""
