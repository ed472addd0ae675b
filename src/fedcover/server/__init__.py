"""The server's round: ask clients, check what comes back, average it, evaluate."""
