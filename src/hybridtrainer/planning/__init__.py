"""What a training run will take, found before it begins."""
