"""`TrainingSpec`, the description of a training run, with its readers and its edits."""
