"""Local training: SGD on one client, recipes that change it, and engines that run it fast."""
