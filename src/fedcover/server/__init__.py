"""The server's part of a round: sample clients, validate and aggregate updates, evaluate."""
