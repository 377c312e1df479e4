"""Other people's training programs, with healcore inserted by a few lines."""
