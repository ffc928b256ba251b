"""What people see of a run: log, progress, statistics, environment."""
