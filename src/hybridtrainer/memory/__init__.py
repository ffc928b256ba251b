"""Where weights, gradients and optimizer state live, and how they travel."""
