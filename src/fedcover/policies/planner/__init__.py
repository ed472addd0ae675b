"""Exact plans of who trains what."""
