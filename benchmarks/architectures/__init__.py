"""Which architectures of other libraries are traced, cut and equal to their masked whole."""
