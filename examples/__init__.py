"""Runnable examples; the tests run every one of them."""
