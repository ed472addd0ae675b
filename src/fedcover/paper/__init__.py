"""The paper's claims, every cell of its tables as an experiment, and what its public code does."""
