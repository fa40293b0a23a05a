"""What is trained and how: `TrainingSpec`, its readers and its edits."""
