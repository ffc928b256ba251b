"""HybridTrainer inside other people's training loops. Each module needs the package that its name says."""
