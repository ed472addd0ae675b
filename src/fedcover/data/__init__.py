"""Load data sets and divide them among clients; digits.LICENSE.md names the source of `digits`."""
