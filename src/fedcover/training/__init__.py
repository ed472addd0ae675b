"""Training on one client, and the engines that train many at once."""
