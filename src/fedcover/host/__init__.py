"""What fedcover needs of the operating system: files, locks, signals and processes."""
