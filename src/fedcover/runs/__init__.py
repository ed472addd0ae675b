"""Runs: from an experiment's fields to a folder of results, in one process or several."""
