"""The computer a run is on: its files, locks, signals and processes."""
