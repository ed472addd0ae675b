"""The paper as data and as code: its claims, every cell of its tables as an experiment, what its public code does."""
