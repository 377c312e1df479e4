"""Hugging Face: transformers.Trainer, and the trainers of TRL, which are Trainers."""
