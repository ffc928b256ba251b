"""GPU kernels, each beside a plain PyTorch reference that says what it computes and runs on a CPU."""
